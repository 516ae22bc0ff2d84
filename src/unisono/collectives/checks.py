"""What is checked before a collective begins, with errors that name the rank and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import name_of, nbytes_of
from unisono.errors import TensorError, UsageError


def check_root(group: Group, root: int, collective: str) -> None:
    """Raise UsageError for a root that is no rank of the group."""
    if not 0 <= root < group.size:
        raise UsageError(f"rank {group.rank}: {collective} with root {root}; the group has ranks 0 to {group.size - 1}")


def check_parts(group: Group, parts: Sequence[torch.Tensor], dtype: torch.dtype, collective: str) -> None:
    """Raise TensorError unless there is a part for each rank, all of `dtype` and in plain CPU memory."""
    others = {part.dtype for part in parts} - {dtype}
    if len(parts) != group.size or others:
        raise TensorError(
            f"rank {group.rank}: {collective} of {len(parts)} parts of {sorted(map(name_of, {*others, dtype}))}; "
            f"it needs {group.size} of {name_of(dtype)}, one for each rank"
        )
    for part in parts:
        nbytes_of(part)
