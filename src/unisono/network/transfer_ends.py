"""Ends of all messages of a schedule as columns of numbers, in the order of rank, lane, round and transfer.

    programs   rank 0 │ lane 0: round 0, round 1, ... │ lane 1 ...      made one after another and discarded
    forms      ranks 0 2 4 6 │ peers 1 3 5 7                            one program for all ranks that do the same

Both give the same columns. A form fills them for all of its ranks at once: 40,960 programs of halving take a fraction
of a second, where one after another they take several.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError
from unisono.schedules.schedule import Action, Form, Program, Transfer

Column = NDArray[np.int64]


class TransferEnds(NamedTuple):
    """Ends of all messages, both of each."""

    lanes: int
    rounds: Column
    """Number of rounds of each rank and lane."""
    transfers: Column
    """Number of transfers of each round."""
    action: Column
    """Action of each transfer: 0 for SEND, 1 for RECEIVE, 2 for ADD."""
    peer: Column
    chunk: Column
    span: Column


def ends_of_programs(programs: Iterable[Program]) -> TransferEnds:
    """Return the ends of the programs of ranks 0, 1, ... Raises ScheduleError for different numbers of lanes."""
    rounds, transfers, action, peer, chunk, span = (array("i") for _ in range(6))
    lanes = 0
    for program in programs:
        if lanes and len(program.lanes) != lanes:
            raise ScheduleError(f"a rank has {len(program.lanes)} lanes where rank 0 has {lanes}")
        lanes = len(program.lanes)
        for lane in program.lanes:
            rounds.append(len(lane))
            transfers.extend(map(len, lane))
            flat = list(chain.from_iterable(lane))
            action.extend([_number(t[0]) for t in flat])
            peer.extend([t[1] for t in flat])
            chunk.extend([t[2] for t in flat])
            span.extend([t[3] for t in flat])
    columns = (np.array(column, np.int64) for column in (rounds, transfers, action, peer, chunk, span))
    return TransferEnds(lanes, *columns)


def ends_of_forms(forms: Sequence[Form], ranks: int) -> TransferEnds:
    """Return the ends of forms, which together have each of the ranks 0, 1, ..., `ranks` - 1 once."""

    def column(numbers: Callable[[Program], list[Any]]) -> Column:
        """Return numbers, each equal for all ranks of a form or an array of one for each, in the order of ranks."""
        made = [(form.ranks, numbers(form.program)) for form in forms]
        counts = np.empty(ranks, np.int64)
        for some, found in made:
            counts[some] = len(found)
        first = np.cumsum(counts) - counts
        flat = np.empty(int(counts.sum()), np.int64)
        for some, found in made:
            for place, number in enumerate(found):
                flat[first[some] + place] = number
        return flat

    def transfers(program: Program) -> list[Transfer]:
        return [one for lane in program.lanes for transfers in lane for one in transfers]

    return TransferEnds(
        len(forms[0].program.lanes),
        column(lambda program: [len(lane) for lane in program.lanes]),
        column(lambda program: [len(one) for lane in program.lanes for one in lane]),
        column(lambda program: [_number(one.action) for one in transfers(program)]),
        column(lambda program: [one.peer for one in transfers(program)]),
        column(lambda program: [one.chunk for one in transfers(program)]),
        column(lambda program: [one.span for one in transfers(program)]),
    )


def _number(action: Action) -> int:
    return 0 if action is Action.SEND else 1 if action is Action.RECEIVE else 2
