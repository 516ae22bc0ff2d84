"""States and norms of a split model as if it were whole: the same tensors under the same names, whatever the split.

    rank 0   fc1.weight (3, 8), its momentum (3, 8) ┐ all-gather in the model group
    rank 1   fc1.weight (3, 8), its momentum (3, 8) ┴──▶ rank 0: fc1.weight (6, 8), its momentum (6, 8)

Loading is local: each rank cuts its own part. One tensor at a time is whole on the ranks beside rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.reducer.bucket_memory import norm_of_all
from unisono.tensor_parallel.layers import WeightPart
from unisono.tensor_parallel.model import named_parts, split_of
from unisono.world import World

NEEDS_WHOLE = ("LARS", "LAMB", "Adafactor", "LBFGS", "Muon")
"""Optimizers whose step of an element depends on all elements of its parameter."""

LAYERWISE = NEEDS_WHOLE[:2]
"""Those of them that need norms of layers, which `Sharded` sums over the ranks."""


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state_dict with whole tensors on rank 0, {} elsewhere. Called by all ranks together."""
    state, split = model.state_dict(), split_of(model)
    if split is None:
        return state
    parts, parameters = named_parts(model), dict(model.named_parameters(remove_duplicate=False))
    whole = ((name, _whole(own, parameters.get(name), parts)) for name, own in state.items())
    return {name: value for name, value in whole if split.world.rank == 0}


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with whole tensors on rank 0, {} elsewhere. Called by all ranks together."""
    state, split = optimizer.state_dict(), split_of(model)
    if split is None:
        return state
    parts, parameters, states = named_parts(model), _parameters(optimizer), dict[int, dict[str, Any]]()
    for number, entries in sorted(state["state"].items()):
        whole = ((key, _whole(entries[key], parameters[number], parts)) for key in sorted(entries))
        states[number] = {key: value for key, value in whole if split.world.rank == 0}
    return {**state, "state": states} if split.world.rank == 0 else {}


def cut_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict with this rank's parts, from one with whole tensors. Not collective."""
    parts, states = named_parts(model), dict(state["state"])
    for number, parameter in enumerate(_parameters(optimizer)):
        if number in states and id(parameter) in parts:
            part, _ = parts[id(parameter)]
            whole = part.whole_shape(parameter.shape)
            states[number] = {
                key: part.cut(value) if isinstance(value, Tensor) and value.shape == whole else value
                for key, value in states[number].items()
            }
    return {**state, "state": states}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, by their numbers in its state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _whole(value: Any, parameter: Tensor | None, parts: Mapping[int, tuple[WeightPart, World]]) -> Any:
    """Return the whole tensor for one that is shaped like a parameter's part; anything else as it is."""
    if parameter is None or id(parameter) not in parts:
        return value
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    part, group = parts[id(parameter)]
    own = value.detach().contiguous()
    return part.join(group.all_gather(own, own.new_empty((group.size, *own.shape))))


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that the norm of all together is at most `max_norm`, and return the norm before.

    For a user's own loop, after `backward()`, in place of `torch.nn.utils.clip_grad_norm_`. Called by all ranks.
    """
    split, parameters = split_of(model), list(model.parameters())
    if split is None:
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))
    parts = {key: part.ranks for key, (part, _) in named_parts(model).items()}
    norm = float(norm_of_all(((parameter.grad, parts.get(id(parameter), 1)) for parameter in parameters), split.world))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def check_split_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, sharded: bool) -> None:
    """Raise UsageError for an optimizer that needs whole parameters, where the model has parts of some.

    A `sharded` rule gives it norms of whole ones.
    """
    name = type(optimizer).__name__
    if name in NEEDS_WHOLE and named_parts(model) and not (sharded and name in LAYERWISE):
        remedy = "the rule Sharded, or SGD, Adam or AdamW" if name in LAYERWISE else "SGD, Adam or AdamW, or no plan"
        raise UsageError(f"{name} needs whole weights, and some layers are split: use {remedy}")
