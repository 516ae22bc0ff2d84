"""When ranks agree, and how."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from unisono.errors import UsageError
from unisono.gradients import Exchange, Gradients, gradients_of
from unisono.rules.bsp import BSP
from unisono.world import World

__all__ = ["BSP", "Exchange", "add_samples", "no_sync", "parallel", "synchronize"]


def parallel(model: torch.nn.Module, world: World, rule: BSP | None = None) -> torch.nn.Module:
    """Make `model` train in parallel, and return it: the same module, its state_dict unchanged.

    All ranks get rank 0's weights and buffers. From then on, when `backward()` ends, every `.grad` holds the average
    over all ranks. All ranks weigh the same, unless `add_samples` has said how many samples each rank's loss is a mean
    of. A parameter that no rank's backward pass has come to has no gradient. A rank without a batch calls
    `synchronize(model)` instead of `backward()`.
    """
    (rule or BSP()).attach(model, world)
    return model


def no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Within the block, backward passes of a parallel model add up on this rank alone; the next one after it averages.

    Raises UsageError for a model that is not parallel.
    """
    return _gradients_of(model).no_sync()


def add_samples(model: torch.nn.Module, samples: float) -> None:
    """Say that this rank's loss is a mean of so many samples: in the next average the rank weighs its share of them.

    Called before `backward()`, on every rank or on none; calls add up until the next average. 0 is a rank's empty
    batch. Raises UsageError for a number that is negative or not finite, and for a model that is not parallel.
    """
    _gradients_of(model).add_samples(samples)


def synchronize(model: torch.nn.Module) -> None:
    """Average the gradients of a parallel model: what a rank without a batch calls in place of `backward()`.

    The rank gives what it has accumulated under `no_sync`. Where there is nothing, and it has said no samples, it
    weighs nothing. Raises UsageError for a model that is not parallel.
    """
    _gradients_of(model).synchronize()


def _gradients_of(model: torch.nn.Module) -> Gradients:
    gradients = gradients_of(model)
    if gradients is None:
        raise UsageError("the model is not parallel: call unisono.parallel first")
    return gradients
