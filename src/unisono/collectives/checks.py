"""Argument checks before a collective begins; the errors name the rank and the remedy.

    rank 0   all_gather(4 x float32)                waits ─┐
    rank 1   all_gather: two outputs share memory   enters ┴▶ rank 0: MismatchError with rank 1's words
                                                              rank 1: TensorError

A rank that refuses its arguments still enters the call; otherwise the other ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import torch

from unisono.call import call_of
from unisono.collectives.payload import (
    find_aliases,
    is_chunk,
    is_writable,
    name_of,
    nbytes_of,
    same_elements,
    share_memory,
)
from unisono.errors import TensorError, UnisonoError, UsageError

if TYPE_CHECKING:
    from unisono.collectives.group import Group


class Checks:
    """Context in which a collective checks its arguments, before anything is sent. No checks are made elsewhere.

    An error that leaves the block is reported to the other ranks, which are in the same call or will enter it.
    """

    def __init__(self, group: Group, collective: str) -> None:
        self._group, self._collective = group, collective

    def __enter__(self) -> None:
        """Begin the checks."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Enter the call as a rank that refuses it, if a check has raised UsageError."""
        if not isinstance(error, UsageError) or self._group.size == 1:
            return
        reason = str(error).removeprefix(f"rank {self._group.rank}: ")
        call = call_of(f"{self._collective}, refused")
        try:
            self._group.barrier(call._replace(description=f"{self._collective}, which it refused ({reason})"))
        except UnisonoError as barrier_error:
            raise error from barrier_error


def check_tensors(group: Group, collective: str, *values: object) -> None:
    """Raise TensorError, and refuse the call to the other ranks, unless all values are tensors."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            with Checks(group, collective):
                raise TensorError(
                    f"rank {group.rank}: {collective} takes a tensor, and this is of type {type(value).__name__}: give "
                    "torch.as_tensor(x); a number is summed by sum(world.all_gather_object(x)), too"
                )


def check_root(group: Group, root: int, collective: str) -> None:
    """Raise UsageError for a root that is not a rank of the group."""
    if not isinstance(root, Integral) or not 0 <= root < group.size:
        raise UsageError(
            f"rank {group.rank}: {collective} with root {root!r}; the group has ranks 0 to {group.size - 1}"
        )


def check_parts(group: Group, parts: Sequence[torch.Tensor], dtype: torch.dtype, collective: str) -> None:
    """Raise TensorError unless there is one part per rank, all of `dtype` and in plain CPU memory."""
    other_dtypes = {part.dtype for part in parts} - {dtype}
    if len(parts) != group.size or other_dtypes:
        raise TensorError(
            f"rank {group.rank}: {collective} of {len(parts)} parts of {sorted(map(name_of, {*other_dtypes, dtype}))}; "
            f"it needs {group.size} of {name_of(dtype)}, one for each rank"
        )
    for part in parts:
        nbytes_of(part)


def check_output(group: Group, output: torch.Tensor, collective: str) -> None:
    """Raise TensorError for an output in which several elements share memory."""
    if not output.is_contiguous() and not is_writable(output):
        raise TensorError(
            f"rank {group.rank}: {collective} into a tensor of shape {tuple(output.shape)} and strides "
            f"{output.stride()}: several of its elements share memory; give it a .clone()"
        )


def check_memory(
    group: Group,
    collective: str,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] = (),
    in_place: Collection[tuple[int, int]] = (),
    allowed: Callable[[torch.Tensor, torch.Tensor], bool] = same_elements,
) -> None:
    """Raise TensorError where an output shares memory with itself, or with another tensor, as `find_aliases` says."""
    for output in outputs:
        check_output(group, output, collective)
    if aliases := find_aliases(outputs, inputs, in_place, allowed):
        raise TensorError(
            f"rank {group.rank}: {collective} of {len(outputs)} outputs and {len(inputs)} inputs: {aliases} share "
            "memory; give each memory of its own"
        )


def check_chunk(group: Group, collective: str, chunk: torch.Tensor, full: torch.Tensor, start: int) -> None:
    """Raise TensorError if a chunk shares memory with `full` but is not its elements from `start` on."""
    if share_memory(chunk, full) and not is_chunk(chunk, full, start):
        raise TensorError(
            f"rank {group.rank}: {collective}: input and output share memory, but not in place: then this rank's chunk "
            f"is elements {start} to {start + chunk.numel()} of the whole, both contiguous; give it memory of its own"
        )
