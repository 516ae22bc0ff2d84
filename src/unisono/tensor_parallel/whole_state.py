"""States of a split model as if it were whole: the same tensors under the same names, whatever the split.

    rank 0   fc1.weight (3, 8), its momentum (3, 8) ┐ all-gather in the model group
    rank 1   fc1.weight (3, 8), its momentum (3, 8) ┴──▶ rank 0: fc1.weight (6, 8), its momentum (6, 8)

Loading is local: each rank cuts its own part. One tensor at a time is whole on the ranks beside rank 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono.tensor_parallel.layers import WeightPart
from unisono.tensor_parallel.model import named_parts, split_of
from unisono.world import World


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state_dict with whole tensors on rank 0, {} elsewhere. Called by all ranks together."""
    state = model.state_dict()
    found = split_of(model)
    if found is None:
        return state
    parts, whole = named_parts(model), {}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name, own in state.items():
        part = parts.get(id(tensors[name])) if name in tensors else None
        value = own if part is None else _joined(own, *part)
        if found.world.rank == 0:
            whole[name] = value
    return whole


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with whole tensors on rank 0, {} elsewhere. Called by all ranks together."""
    state = optimizer.state_dict()
    found = split_of(model)
    if found is None:
        return state
    parts, whole = _parts_by_number(model, optimizer), {}
    for number, entries in sorted(state["state"].items()):
        part, joined = parts.get(number), {}
        for key in sorted(entries):
            value = entries[key] if part is None else _joined_like(entries[key], *part)
            if found.world.rank == 0:
                joined[key] = value
        whole[number] = joined
    return {**state, "state": whole} if found.world.rank == 0 else {}


def cut_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict with this rank's parts, from one with whole tensors. Not collective."""
    cut = dict(state["state"])
    for number, (part, _, own) in _parts_by_number(model, optimizer).items():
        whole = part.whole_shape(own)
        cut[number] = {
            key: part.cut(value) if isinstance(value, Tensor) and value.shape == whole else value
            for key, value in cut.get(number, {}).items()
        }
        if not cut[number]:
            del cut[number]
    return {**state, "state": cut}


def _parts_by_number(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, tuple[WeightPart, World, tuple[int, ...]]]:
    """Return part, world and shape of each split parameter, by its number in the optimizer's state_dict."""
    parts = named_parts(model)
    numbered = enumerate(one for group in optimizer.param_groups for one in group["params"])
    return {number: (*parts[id(one)], tuple(one.shape)) for number, one in numbered if id(one) in parts}


def _joined(own: Tensor, part: WeightPart, group: World) -> Tensor:
    """Return the whole tensor of which each rank of the group has a part."""
    own = own.detach().contiguous()
    return part.join(group.all_gather(own, own.new_empty((group.size, *own.shape))))


def _joined_like(value: Any, part: WeightPart, group: World, shape: tuple[int, ...]) -> Any:
    """Return the whole tensor for one that is shaped like a parameter's part; anything else as it is."""
    return _joined(value, part, group) if isinstance(value, Tensor) and tuple(value.shape) == shape else value
