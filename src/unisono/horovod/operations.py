"""Horovod's collectives on a world: the part that the session's thread carries out."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.world import World


class ReduceOp(Enum):
    """Reduction over ranks."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "minimum"
    MAX = "maximum"
    PRODUCT = "product"


def reduce(
    tensor: torch.Tensor, op: ReduceOp, before: float, after: float, wire: str | None, world: World
) -> torch.Tensor:
    own = tensor.detach()
    _scale(own, before)
    world.allreduce(own, wire=wire, op="sum" if op is ReduceOp.AVERAGE else op.value)
    if op is ReduceOp.AVERAGE:
        own.copy_(_mean(own, world.size))
    _scale(own, after)
    return tensor


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers by a whole factor exactly, by another in float64."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    elif factor == int(factor):
        tensor.mul_(int(factor))
    else:
        tensor.copy_(tensor.double() * factor)


def broadcast(tensor: torch.Tensor, root: int, world: World) -> torch.Tensor:
    if not 0 <= root < world.size:
        raise UsageError(f"broadcast from rank {root}: the ranks are 0 to {world.size - 1}")
    world.broadcast(tensor.detach(), root)
    return tensor


def gather(tensor: torch.Tensor, world: World) -> torch.Tensor:
    rows = torch.empty(world.size, dtype=torch.int64)
    world.all_gather(torch.tensor([tensor.shape[0]]), rows)
    out = tensor.new_empty((int(rows.sum()), *tensor.shape[1:]))
    world.all_to_all_v([tensor.contiguous()] * world.size, torch.split(out, rows.tolist()))
    return out


def all_to_all(tensor: torch.Tensor, splits: Any, world: World) -> Any:
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None and rows % world.size:
        raise UsageError(f"alltoall: {world.size} ranks do not divide {rows} rows: give splits")
    sizes = torch.full((world.size,), rows // world.size) if splits is None else torch.as_tensor(splits).long()
    if len(sizes) != world.size or int(sizes.sum()) != rows or bool((sizes < 0).any()):
        raise UsageError(f"alltoall: splits {sizes.tolist()} do not cut {rows} rows into {world.size} parts")
    received = world.all_to_all(sizes.clone())
    out = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    world.all_to_all_v(torch.split(tensor.contiguous(), sizes.tolist()), torch.split(out, received.tolist()))
    return out, received if splits is None else received.to(torch.as_tensor(splits).dtype)


def reduce_scatter(
    tensor: torch.Tensor, op: ReduceOp, before: float, after: float, wire: str | None, world: World
) -> torch.Tensor:
    least, more = divmod(tensor.shape[0], world.size)
    if more:  # shares of whole rows differ, a schedule's chunks do not end with rows
        begin = world.rank * least + min(world.rank, more)
        rows = least + (world.rank < more)
        return reduce(tensor.clone(), op, before, after, wire, world)[begin : begin + rows].clone()
    own = tensor.clone()
    _scale(own, before)
    part = world.reduce_scatter(own, wire=wire).view(least, *tensor.shape[1:])
    part = _mean(part, world.size) if op is ReduceOp.AVERAGE else part
    _scale(part, after)
    return part


def _mean(total: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return a sum over `ranks` divided by them; integers are cut off towards 0."""
    return torch.div(total, ranks, rounding_mode=None if total.is_floating_point() else "trunc")
