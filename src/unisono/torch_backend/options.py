"""Options of a process group: `pg_options` of `init_process_group` and `new_group`."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.wires import WIRES


@dataclass(frozen=True)
class Options:
    """Options of a process group.

    `wire` is the number format in which float32 and float64 tensors are sent between nodes when they are summed
    (all_reduce, reduce_scatter, with SUM, AVG or PREMUL_SUM); sums are computed in float32. It applies to tensors of
    `wire_from` bytes or more: shorter ones gain nothing, and counts and losses keep all their digits. Raises UsageError
    for an unknown `wire` and a negative `wire_from`.
    """

    wire: str | None = None
    wire_from: int = 64 << 10

    def __post_init__(self) -> None:
        if self.wire is not None and self.wire not in WIRES:
            raise UsageError(f"wire = {self.wire!r}; it is one of None, {', '.join(WIRES)}")
        if self.wire_from < 0:
            raise UsageError(f"wire_from = {self.wire_from}; it is a number of bytes, 0 or more")
