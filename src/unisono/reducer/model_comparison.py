"""Comparison of the ranks' models, before any tensor of them is exchanged.

rank 0   0.weight (4, 4) float32   1.weight (2, 4) float32   hash ─┐ one number is compared
rank 1   0.weight (4, 4) float32   1.weight (3, 4) float32   hash ─┘ only if it differs, ranks exchange all descriptions
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch

from unisono.errors import MismatchError
from unisono.world import World

Description = Sequence[tuple[str, str]]
"""Names of tensors, each with the properties that must be equal on all ranks."""

REMEDY = "build the same model on every rank, from the same options and in the same order"


def compare_models(model: torch.nn.Module, world: World) -> None:
    """Raise MismatchError on every rank where names, shapes, dtypes or frozen parameters are not the same on all."""
    if world.size == 1:
        return
    mine = describe(model)
    number = int.from_bytes(hashlib.sha256(repr(mine).encode()).digest()[:7], "little")
    largest = world.allreduce(torch.tensor([number, -number]), op="maximum")
    if int(largest[0]) != -int(largest[1]):
        raise MismatchError(difference(world.all_gather_object(mine)))


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number below 2**52 that tensors with other bits do not share, but by chance."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest()[:8], "little") >> 12


def describe(model: torch.nn.Module) -> Description:
    """Return the parameters and buffers of a model in order. A tensor with several names is listed under each."""
    parameters = [(f"parameter {name}", one) for name, one in model.named_parameters(remove_duplicate=False)]
    buffers = [(f"buffer {name}", one) for name, one in model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    descriptions = []
    for name, tensor in (*parameters, *buffers):
        known = first.setdefault(id(tensor), name)
        descriptions.append((name, _description_of(tensor) + ("" if known == name else f", the same as {known}")))
    return descriptions


def difference(descriptions: Sequence[Description]) -> str:
    """Return a message with the first difference between rank 0's model and another rank's."""
    for rank, other in enumerate(descriptions):
        for one, another in zip_longest(descriptions[0], other):
            if one != another:
                return (
                    f"the models of ranks 0 and {rank} differ: rank 0 has {_entry_text(one)}, "
                    f"rank {rank} has {_entry_text(another)}: {REMEDY}"
                )
    return f"the models differ: {REMEDY}"


def _description_of(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    frozen = ", frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} of {dtype}{frozen}"


def _entry_text(entry: tuple[str, str] | None) -> str:
    return "no more" if entry is None else f"{entry[0]}, {entry[1]}"
