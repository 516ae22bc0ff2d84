"""What a process group may be asked for: `pg_options` of `init_process_group` and `new_group`."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.wires import WIRES


@dataclass(frozen=True)
class Options:
    """The options of a process group.

    `wire` is the number format in which float32 and float64 tensors travel between nodes when they are summed
    (all_reduce, reduce_scatter, with SUM, AVG or PREMUL_SUM); sums are made in float32. It serves tensors of
    `wire_from` bytes or more: what is shorter gains nothing, and counts and losses keep all their digits.
    """

    wire: str | None = None
    wire_from: int = 64 << 10

    def __post_init__(self) -> None:
        if self.wire is not None and self.wire not in WIRES:
            raise UsageError(f"wire = {self.wire!r}; it is one of None, {', '.join(WIRES)}")
        if self.wire_from < 0:
            raise UsageError(f"wire_from = {self.wire_from}; it is a number of bytes, 0 or more")
