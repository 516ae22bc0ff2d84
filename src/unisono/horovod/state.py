"""Weights, optimizer state and Python objects of one rank for all, and of all ranks for each."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from unisono.errors import UsageError
from unisono.horovod.collectives import broadcast_
from unisono.horovod.session import rank, session, size

Object = TypeVar("Object")


class _Refused(NamedTuple):
    """Object that could not be pickled."""

    reason: str


def broadcast_object(obj: Object, root_rank: int = 0, name: str | None = None) -> Object:
    """Return the object of `root_rank`, pickled, on every rank. Raises UsageError on all where that fails."""
    if not 0 <= root_rank < size():
        raise UsageError(f"broadcast_object from rank {root_rank}: the ranks are 0 to {size() - 1}")
    return allgather_object(obj if rank() == root_rank else None, name)[root_rank]  # type: ignore[return-value]


def allgather_object(obj: Object, name: str | None = None) -> list[Object]:
    """Return every rank's object, pickled, in rank order. Raises UsageError on all ranks where that fails on one."""
    own = session()
    pickled = _pickled(obj)
    found = own.wait(own.submit(lambda world: world.all_gather_object(pickled), name))
    objects: list[Object] = []
    for source, data in enumerate(found):
        if isinstance(data, _Refused):
            raise UsageError(f"the object of rank {source} cannot be pickled: {data.reason}")
        objects.append(pickle.loads(data))
    return objects


def _pickled(obj: object) -> bytes | _Refused:
    try:
        return pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises for lambdas and the like
        return _Refused(str(error))


def broadcast_parameters(
    params: Mapping[str, object] | Iterable[tuple[str, torch.Tensor] | torch.Tensor], root_rank: int = 0
) -> None:
    """Copy the tensors of `root_rank` to all ranks: of a `state_dict()`, of `named_parameters()`, or of a list."""
    for one in params.values() if isinstance(params, Mapping) else params:
        tensor = one[1] if isinstance(one, tuple) and len(one) == 2 else one
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor, root_rank)
        elif not isinstance(params, Mapping):
            raise UsageError(f"broadcast_parameters takes tensors, or pairs of a name and a tensor, not {type(one)}")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Load the state and the options (learning rate, ...) of `root_rank`'s optimizer on all ranks."""
    mine = rank() == root_rank
    own = optimizer.state_dict()
    shapes = {key: {name: _shape_of(value) for name, value in entry.items()} for key, entry in own["state"].items()}
    shapes, groups = broadcast_object((shapes, own["param_groups"]) if mine else ({}, []), root_rank)
    state = {key: {name: _empty(value) for name, value in entry.items()} for key, entry in shapes.items()}
    for key, entry in state.items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                if mine:
                    value.copy_(own["state"][key][name])
                broadcast_(value, root_rank)
    optimizer.load_state_dict({"state": state, "param_groups": groups})  # on all: it may change a tensor's dtype


def _shape_of(value: Any) -> Any:
    """Return a tensor without memory in place of a tensor."""
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _empty(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
