"""Norms over all gradients of a split model, and optimizers that need whole weights."""

from __future__ import annotations

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.reducer.bucket_memory import norm_of_all
from unisono.tensor_parallel.model import named_parts, split_of

NEEDS_WHOLE = ("LARS", "LAMB", "Adafactor", "LBFGS", "Muon")
"""Optimizers whose step of an element depends on all elements of its parameter."""

LAYERWISE = NEEDS_WHOLE[:2]
"""Those of them that need norms of layers, which `Sharded` sums over the ranks."""


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that the norm of all together is at most `max_norm`, and return the norm before.

    For a user's own loop, after `backward()`, in place of `torch.nn.utils.clip_grad_norm_`. Called by all ranks.
    """
    found = split_of(model)
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    if found is None:
        return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    parts = {key: part.ranks for key, (part, _) in named_parts(model).items()}
    norm = float(norm_of_all(((one.grad, parts.get(id(one), 1)) for one in model.parameters()), found.world))
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def check_split_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, sharded: bool) -> None:
    """Raise UsageError for an optimizer that needs whole parameters, where the model has parts of some.

    A `sharded` rule gives it norms of whole ones.
    """
    name = type(optimizer).__name__
    if name in NEEDS_WHOLE and named_parts(model) and not (sharded and name in LAYERWISE):
        remedy = "the rule Sharded, or SGD, Adam or AdamW" if name in LAYERWISE else "SGD, Adam or AdamW, or no plan"
        raise UsageError(f"{name} needs whole weights, and some layers are split: use {remedy}")
