"""Lists and rows of tensors, as PyTorch passes them, mapped to collectives of one tensor with equal chunks.

[a a] [b b]  ◀── copied ──  a a b b        gathered side by side between nodes when all are as long, else each by itself
[a] [b b b]  ── filled ──▶  a - - b b b    parts that are to be reduced are filled up to the longest
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.collectives.all_gather import all_gather
from unisono.collectives.all_gather_v import all_gather_v, check_gather
from unisono.collectives.checks import Checks, check_output, check_parts
from unisono.collectives.group import Group
from unisono.collectives.payload import name_of
from unisono.errors import TensorError


def gather_list(group: Group, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Gather every rank's `tensor` on all ranks: parts[r] receives rank r's. Sizes may differ between ranks."""
    if group.one_node or len(parts) != group.size or any(part.numel() != parts[0].numel() for part in parts):
        all_gather_v(group, tensor, parts)
        return
    with Checks(group, "all_gather"):
        check_gather(group, tensor, parts)
    flat = torch.empty(group.size * tensor.numel(), dtype=tensor.dtype)
    all_gather(group, tensor, flat)
    spread(flat, parts)


def reduce_list(
    group: Group,
    output: torch.Tensor,
    parts: Sequence[torch.Tensor],
    reduce: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Reduce parts[r] over all ranks into rank r's output; `reduce(chunk, flat)` does so for equal chunks.

    The parts are copied before anything is written, so the output may share memory with them. Raises TensorError unless
    this rank's own part is as long as its output.
    """
    with Checks(group, "reduce_scatter"):
        check_parts(group, parts, output.dtype, "reduce_scatter")
        check_output(group, output, "reduce_scatter")
        own = parts[group.rank].numel()
        if own != output.numel():
            raise TensorError(
                f"rank {group.rank}: reduce_scatter of an own part of {own} x {name_of(output.dtype)} into "
                f"{output.numel()}; make them equally long"
            )
    longest = max(part.numel() for part in parts)
    flat = torch.zeros(len(parts), longest, dtype=output.dtype)
    for row, part in zip(flat, parts, strict=True):
        row[: part.numel()] = part.detach().reshape(-1)
    chunk = torch.empty(longest, dtype=output.dtype)
    reduce(chunk, flat)
    output.detach().copy_(chunk[: output.numel()].view(output.shape))


def rows(group: Group, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return one slice of rows per rank: counts[r] rows for rank r, or equal parts where `counts` is empty.

    Raises TensorError unless there is a count for each rank and they add up to the rows of the tensor.
    """
    have = tensor.shape[0] if tensor.dim() else 0
    sizes = list(counts) or [have // group.size] * group.size
    if len(sizes) != group.size or sum(sizes) != have or min(sizes) < 0:
        raise TensorError(
            f"rank {group.rank}: all_to_all of a tensor of shape {tuple(tensor.shape)} in {sizes} rows; it needs a "
            f"number for each of {group.size} ranks, {have} together"
        )
    return list(torch.split(tensor.detach(), sizes))


def together(tensors: Sequence[torch.Tensor], action: Callable[[torch.Tensor], None]) -> None:
    """Apply an in-place `action` to tensors that share no memory; those of one dtype are passed as one flat tensor."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        action(flat)
        spread(flat, alike)


def spread(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy a flat tensor into `parts`, one after another; together they are as long."""
    start = 0
    for part in parts:
        part.detach().copy_(flat[start : start + part.numel()].view(part.shape))
        start += part.numel()
