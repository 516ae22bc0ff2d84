"""When ranks agree, and how."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from unisono.errors import UsageError
from unisono.gradients import Exchange, gradients_of
from unisono.rules.bsp import BSP
from unisono.world import World

__all__ = ["BSP", "Exchange", "no_sync", "parallel"]


def parallel(model: torch.nn.Module, world: World, rule: BSP | None = None) -> torch.nn.Module:
    """Make `model` train in parallel, and return it: the same module, its state_dict unchanged.

    All ranks get rank 0's weights and buffers. From then on, when `backward()` ends, every `.grad` holds the average
    over all ranks, each rank's weighted by its samples: the length of the first dimension of what the model was given
    since the last average. A parameter that no rank's backward pass has come to has no gradient. A rank without a batch
    calls `gradients_of(model).exchange()` instead of `backward()`.
    """
    (rule or BSP()).attach(model, world)
    return model


def no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Within the block, backward passes of a parallel model add up on this rank alone; the next one after it averages.

    Raises UsageError for a model that is not parallel.
    """
    gradients = gradients_of(model)
    if gradients is None:
        raise UsageError("the model is not parallel: call unisono.parallel first")
    return gradients.no_sync()
