"""Proof that a schedule is correct for one number of ranks, by running it on sets of contributions instead of numbers.

Every chunk on every rank holds the set of ranks whose contributions are in it. Messages are passed only when both ends
are in the round that names them (rule 3 of `schedule.py`), so a schedule that passes needs no buffering.

    allreduce        begins {r} everywhere,                ends {0..p-1} in every chunk of every rank
    reduce_scatter   begins {r} everywhere,                ends {0..p-1} in chunk r of rank r
    all_gather       begins {0..p-1} in chunk r of rank r, ends {0..p-1} in every chunk of every rank
    broadcast        begins {0..p-1} in all of rank 0,     ends {0..p-1} in every chunk of every rank
    reduce           begins {r} everywhere,                ends {0..p-1} in all of rank 0
    all_to_all       begins {r to d} in chunk d of rank r, ends {s to r} in chunk p+s of rank r, for all s but r

A chunk that "begins" does not name holds old memory contents, so that adding to it is detected, too.

Beside its contributions, each copy of a chunk has a *history*: which sums made it, in which order, and where a narrow
wire has rounded it. A rank keeps what it has sent, so a copy that is sent is rounded and one that is not sent is not.
Copies with one history have the same bits on any wire.
"""

from __future__ import annotations

from enum import Enum

from unisono.errors import ScheduleError
from unisono.placement import Placement, one_rank_per_node
from unisono.schedules.program_checks import check_placement, check_program
from unisono.schedules.schedule import Algorithm, Program
from unisono.schedules.symbolic_run import Copy, Held, Histories, Rounding, SymbolicRun

_UNSET = frozenset([-1])
"""Contributions in a chunk that no rank has set."""


class Goal(Enum):
    """Collective that a schedule carries out."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"


def verify(algorithm: Algorithm, ranks: int, goal: Goal = Goal.ALLREDUCE, placement: Placement | None = None) -> None:
    """Raise ScheduleError unless the schedule reaches its goal on `ranks` ranks, by default with one rank per node.

    Checks that every contribution arrives exactly once, no rank waits forever, no message is left over, messages are
    received in the order and shape they were sent, no two transfers race for a chunk, and all ranks end with the same
    bits on any wire. Costs O(ranks^2 x chunks).
    """
    if ranks < 1:
        raise ScheduleError(f"a schedule is verified on 1 rank or more, not on {ranks}")
    placed = placement or one_rank_per_node(ranks)
    programs = [algorithm(rank, ranks) for rank in range(ranks)]
    for rank, program in enumerate(programs):
        check_program(rank, ranks, program, programs[0])
        check_placement(rank, program, placed)

    def rounds(sender: int, receiver: int) -> bool:
        return programs[0].landing_remote is None or placed.node_of(sender) != placed.node_of(receiver)

    held = _played(programs, goal, rounds)
    _check_end(held, ranks, goal)
    if goal not in (Goal.REDUCE_SCATTER, Goal.REDUCE, Goal.ALL_TO_ALL) and (unlike := _unlike(held)) is not None:
        rank, chunk = unlike
        if _unlike(_played(programs, goal, lambda _, __: False)) is not None:
            raise ScheduleError(
                f"rank {rank} ends with other bits in chunk {chunk} than rank 0: their terms were summed in another "
                "order. Let one rank make the sum, or all sum the same copies (partner r XOR 2^k, not r + 2^k)"
            )
        raise ScheduleError(
            f"rank {rank} ends with other bits in chunk {chunk} than rank 0 on a narrow wire: one of the two has sent "
            "its copy, which rounds it, and the other has not. Let all ranks that make a sum send it, or none"
        )


def _check_end(held: Held, ranks: int, goal: Goal) -> None:
    """Raise ScheduleError unless every rank holds what the goal requires."""
    for rank, copies in enumerate(held):
        for chunk, copy in enumerate(copies):
            required = _required(rank, chunk, ranks, goal)
            if required is not None and copy.contributions != required:
                raise ScheduleError(
                    f"rank {rank} ends with chunk {chunk} {_describe_error(copy.contributions, required, goal)}"
                )


def _unlike(held: Held) -> tuple[int, int] | None:
    """Return a rank and a chunk whose history is not that of rank 0; None where all are alike."""
    for rank, copies in enumerate(held):
        for chunk, (copy, first) in enumerate(zip(copies, held[0], strict=True)):
            if copy.history != first.history:
                return rank, chunk
    return None


def _played(programs: list[Program], goal: Goal, rounds: Rounding) -> Held:
    """Return the copies with which the programs end."""
    histories = Histories()
    held = _begin(len(programs), programs[0].chunks, goal, histories)
    SymbolicRun(programs, held, goal is not Goal.ALL_TO_ALL, histories, rounds).finish()
    return held


def _begin(ranks: int, chunks: int, goal: Goal, histories: Histories) -> Held:
    needed = {Goal.REDUCE_SCATTER: ranks, Goal.ALL_GATHER: ranks, Goal.ALL_TO_ALL: 2 * ranks}.get(goal, chunks)
    if chunks != needed:
        raise ScheduleError(f"{goal.value} on {ranks} ranks needs {needed} chunks, not {chunks}")
    everyone = frozenset(range(ranks))

    def first(rank: int, chunk: int) -> frozenset[int]:
        match goal:
            case Goal.ALL_GATHER:
                return everyone if chunk == rank else _UNSET
            case Goal.BROADCAST:
                return everyone if rank == 0 else _UNSET
            case Goal.ALL_TO_ALL:
                return frozenset([rank * ranks + chunk]) if chunk < ranks else _UNSET
        return frozenset([rank])

    def copy(rank: int, chunk: int) -> Copy:
        contributions = first(rank, chunk)
        return Copy(contributions, histories.of("old" if contributions == _UNSET else "own", rank, chunk))

    return [[copy(rank, chunk) for chunk in range(chunks)] for rank in range(ranks)]


def _required(rank: int, chunk: int, ranks: int, goal: Goal) -> frozenset[int] | None:
    """Return the required contents of a chunk at the end; None if any will do."""
    if goal is Goal.ALL_TO_ALL:
        sender = chunk - ranks
        return frozenset([sender * ranks + rank]) if sender >= 0 and sender != rank else None
    here = {Goal.REDUCE_SCATTER: chunk == rank, Goal.REDUCE: rank == 0}.get(goal, True)
    return frozenset(range(ranks)) if here else None


def _describe_error(contributions: frozenset[int], required: frozenset[int], goal: Goal) -> str:
    if goal is Goal.ALL_TO_ALL:
        return f"holding {sorted(contributions)}, not {sorted(required)}"
    if missing := sorted(required - contributions):
        return f"lacking the contributions of ranks {missing}"
    return "summed with what lay there before"
