"""Programs at addresses: copies and reductions of memory, with barriers of a node's ranks or messages between.

    programs[0]   copy into slot 0 │ barrier │ reduce slots 0       played before barrier 0, 3, 6, ...
    programs[1]   copy into slot 1 │ barrier │ reduce slots 1       before barrier 1, 4, 7, ...
    programs[2]   copy into slot 2 │ barrier │ reduce slots 2       before barrier 2, 5, 8, ...

A program is rows of five numbers. `_steps.c` plays it where that was compiled: a short call takes a few tenths of a
microsecond. Else, and for reductions that are not compiled, `perform` does, step by step. The bits are the same. The
programs above are those of one node, whose memory all ranks see; `sockets.py` has those across nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.call import Call
from unisono.transports.arithmetic import Arithmetic, Step, arithmetic_of, perform
from unisono.transports.barriers import Signals
from unisono.transports.plan import Play, bytes_at


class RowKind(IntEnum):
    """Kinds of rows, of reductions by op and dtype; `_steps.h` has the same numbers."""

    COPY = 0
    SUM_FLOAT32 = 1
    SUM_FLOAT64 = 2
    SUM_BFLOAT16 = 3
    MORE = 4
    """Third source of the reduction before, or a later one."""
    BARRIER = 5
    OTHER = 6
    """Reduction that is not compiled."""
    SEND = 7
    RECEIVE = 8
    """Messages to and from another rank (`sockets.py`)."""
    ROUND = 9
    """Wait for the messages before it."""
    SUM_INT32 = 10
    SUM_INT64 = 11
    MAXIMUM_INT32 = 12
    MAXIMUM_INT64 = 13
    EXACT_FLOAT32 = 14
    EXACT_FLOAT64 = 15
    """Sums whose bits depend on no order (`exact.py`): blocks are counted from the first element of a row."""
    SUM_FLOAT16 = 16
    PART = 17
    """Wait for the messages to this rank before it; those to others go on, until a ROUND."""


class Row(NamedTuple):
    """Row of a program."""

    kind: RowKind
    amount: int = 0
    """Bytes of a copy or a message, elements of a reduction."""
    into: int = 0
    """Address of the result, or of what is received."""
    source: int = 0
    """Address of the first source, or of what is sent."""
    second: int = 0
    """Address of the second source; of a message, the other rank."""


BARRIER = Row(RowKind.BARRIER)

Rounds = Sequence[Sequence[Row]]
"""Rows of a program, parted by its barriers."""


def copy(into: int, source: int, nbytes: int) -> Row:
    return Row(RowKind.COPY, nbytes, into, source)


def reduction(kind: RowKind, into: int, sources: Sequence[int], count: int) -> list[Row]:
    """Return the rows that reduce `count` elements of two sources or more, in order. `into` may be one of them."""
    first, second, *more = sources
    return [Row(kind, count, into, first, second), *(Row(RowKind.MORE, source=source) for source in more)]


@cache
def kind_of(dtype: torch.dtype, op: str) -> RowKind:
    """Return the kind of a reduction; OTHER for those that are not compiled."""
    return RowKind.__members__.get(f"{op}_{dtype}".replace("torch.", "").upper(), RowKind.OTHER)


BYTES = arithmetic_of(torch.uint8)


def player_of(signals: Signals, call: Call, programs: Sequence[Rounds], arithmetic: Arithmetic = BYTES) -> Play:
    """Return the function that plays one of `programs` in the call `call`, chosen by the number of the next barrier.

    All have as many barriers. `arithmetic` is that of reductions. The caller keeps the memory alive. Another call
    on another rank raises MismatchError on every rank.
    """
    if _are_compiled(signals, programs):
        return signals.connect(call, [_table_of(rounds) for rounds in programs])
    barrier = signals.prepare_barrier(call)
    steps_of_programs = [[[*steps_of(rows, arithmetic)] for rows in rounds] for rounds in programs]

    def play() -> None:
        first, *later = steps_of_programs[(signals.sequence + 1) % len(steps_of_programs)]
        perform(first)
        for steps in later:
            barrier()
            perform(steps)

    return play


def longer_player_of(
    signals: Signals,
    call: Call,
    rounds_from: Callable[[int], Rounds],
    count: int,
    arithmetic: Arithmetic = BYTES,
) -> Play:
    """Return the function that plays one of `count` programs, as `player_of`, each of which is made when it is due."""
    players: dict[int, Play] = {}

    def play() -> None:
        index = (signals.sequence + 1) % count
        player = players.get(index)
        if player is None:
            programs = [rounds_from(index)]
            player = player_of(signals, call, programs, arithmetic)
            if _are_compiled(signals, programs):  # steps in Python can take more memory than the payload
                players[index] = player
        player()

    return play


def _are_compiled(signals: Signals, programs: Sequence[Rounds]) -> bool:
    """Return True if compiled code plays all rows."""
    return signals.compiled and all(
        row.kind is not RowKind.OTHER for rounds in programs for rows in rounds for row in rows
    )


def _table_of(rounds: Rounds) -> np.ndarray[Any, np.dtype[np.int64]]:
    first, *later = rounds
    return np.array([*first, *chain.from_iterable([BARRIER, *rows] for rows in later)], np.int64).reshape(-1, 5)


def steps_of(rows: Sequence[Row], arithmetic: Arithmetic) -> Iterator[Step]:
    """Yield the steps of rows without barriers, as calls of NumPy and PyTorch."""
    for index, row in enumerate(rows):
        if row.kind is RowKind.COPY:
            into, source = (bytes_at(address, row.amount).data for address in (row.into, row.source))
            yield into.__setitem__, (slice(None), source)  # the fastest in Python for a few bytes
        elif row.kind is not RowKind.MORE:
            more = rows[index + 1 : end_of(rows, index)]
            addresses = [row.into, row.source, row.second, *(further.source for further in more)]
            nbytes = row.amount * arithmetic.itemsize
            views = {address: arithmetic.view(bytes_at(address, nbytes)) for address in addresses}
            yield from arithmetic.reduce([views[address] for address in addresses[1:]], views[row.into])


def end_of(rows: Sequence[Row], index: int) -> int:
    """Return the index after a row and the rows of kind MORE behind it."""
    return next((after for after in range(index + 1, len(rows)) if rows[after].kind is not RowKind.MORE), len(rows))
