"""When ranks agree, and how."""

from __future__ import annotations

import torch

from unisono.rules.bsp import BSP, Exchange
from unisono.world import World

__all__ = ["BSP", "Exchange", "parallel"]


def parallel(model: torch.nn.Module, world: World, rule: BSP | None = None) -> torch.nn.Module:
    """Make `model` train in parallel, and return it: the same module, its state_dict unchanged.

    All ranks get rank 0's weights and buffers. From then on, when `backward()` ends, every `.grad` holds the average
    over all ranks, each rank's weighted by its samples: the length of the first dimension of what the model was given
    since the last average. A rank without a batch calls `gradients_of(model).exchange()` instead of `backward()`.
    """
    (rule or BSP()).attach(model, world)
    return model
