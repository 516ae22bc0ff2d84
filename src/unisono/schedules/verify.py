"""Proof that a schedule is correct for one number of ranks, by running it on sets of contributions instead of numbers.

Every chunk on every rank holds the set of ranks whose contributions are in it. Messages are passed only when both ends
are in the round that names them (rule 3 of `schedule.py`), so a schedule that passes needs no buffering.

    allreduce        begins {r} everywhere,                ends {0..p-1} in every chunk of every rank
    reduce_scatter   begins {r} everywhere,                ends {0..p-1} in chunk r of rank r
    all_gather       begins {0..p-1} in chunk r of rank r, ends {0..p-1} in every chunk of every rank
    broadcast        begins {0..p-1} in all of rank 0,     ends {0..p-1} in every chunk of every rank
    reduce           begins {r} everywhere,                ends {0..p-1} in all of rank 0
    all_to_all       begins {r to d} in chunk d of rank r, ends {s to r} in chunk p+s of rank r, for all s but r; any
                     contents in chunks from 2p on

A chunk that "begins" does not name holds old memory contents, so that adding to it is detected, too.

Beside its contributions, each copy of a chunk has a *history*: which sums made it, in which order, and where a narrow
wire has rounded it. A rank keeps what it has sent, so a copy that is sent is rounded and one that is not sent is not.
Copies with one history have the same bits on any wire.

Before that run, each program is checked by itself: its shape, its peers and chunks, and transfers that race for one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import combinations
from operator import itemgetter
from typing import NamedTuple

from unisono.errors import ScheduleError
from unisono.placement import Placement, one_rank_per_node
from unisono.schedules.rounds import RoundRef, begins_of, describe, messages_of, rounds_of
from unisono.schedules.schedule import Action, Algorithm, Program, Round

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

    def rounding(sender: int, receiver: int) -> bool:
        return programs[0].landing_remote is None or placed.node_of(sender) != placed.node_of(receiver)

    messages = messages_of(programs)
    for _, receiver, sent, received in messages:
        if sent.span != received.span or (goal is not Goal.ALL_TO_ALL and sent.chunk != received.chunk):
            got = f"a message of chunk {sent.chunk} span {sent.span}"
            raise ScheduleError(f"{receiver}: {describe(received)} is matched by {got}")
    order = list(begins_of(programs, messages))
    held = _played(programs, order, goal, rounding)
    _check_end(held, ranks, goal)
    if goal not in (Goal.REDUCE_SCATTER, Goal.REDUCE, Goal.ALL_TO_ALL) and (unlike := _unlike(held)) is not None:
        rank, chunk = unlike
        if _unlike(_played(programs, order, goal, lambda _, __: False)) is not None:
            raise ScheduleError(
                f"rank {rank} ends with other bits in chunk {chunk} than rank 0: their terms were summed in another "
                "order. Let one rank make the sum, or all sum the same copies (partner r XOR 2^k, not r + 2^k)"
            )
        raise ScheduleError(
            f"rank {rank} ends with other bits in chunk {chunk} than rank 0 on a narrow wire: one of the two has sent "
            "its copy, which rounds it, and the other has not. Let all ranks that make a sum send it, or none"
        )


def _check_end(held: Held, ranks: int, goal: Goal) -> None:
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


def _played(programs: Sequence[Program], order: Sequence[RoundRef], goal: Goal, rounding: Rounding) -> Held:
    """Return all copies after the rounds, which begin in this order; each ends before the next of its lane begins."""
    held, sent, rounds = _begin(programs, goal), Sent(deque), rounds_of(programs)
    last = {(place.rank, place.lane): place for place in order}.values()  # of each lane
    for place in order:
        rank, lane, index = place
        if index:
            before = place._replace(round=index - 1)
            _end(before, rounds[before], sent, held[rank])
        for action, peer, chunk, span in rounds[place]:
            if action is Action.SEND:
                copies = slice(chunk, chunk + span)
                if rounding(rank, peer):
                    held[rank][copies] = map(Copy.rounded, held[rank][copies])
                sent[lane, rank, peer].append(held[rank][copies])
    for place in last:
        _end(place, rounds[place], sent, held[place.rank])
    return held


def _begin(programs: Sequence[Program], goal: Goal) -> Held:
    ranks, chunks = len(programs), programs[0].chunks
    needed = {Goal.REDUCE_SCATTER: ranks, Goal.ALL_GATHER: ranks, Goal.ALL_TO_ALL: 2 * ranks}.get(goal, chunks)
    if chunks != needed and not (goal is Goal.ALL_TO_ALL and chunks > needed and chunks % ranks == 0):
        raise ScheduleError(f"{goal.value} on {ranks} ranks needs {needed} chunks, not {chunks}")
    everyone = frozenset(range(ranks))
    begins: dict[Goal, Callable[[int, int], frozenset[int]]] = {
        Goal.ALL_GATHER: lambda rank, chunk: everyone if chunk == rank else _UNSET,
        Goal.BROADCAST: lambda rank, _: everyone if rank == 0 else _UNSET,
        Goal.ALL_TO_ALL: lambda rank, chunk: frozenset([rank * ranks + chunk]) if chunk < ranks else _UNSET,
    }
    begin: Callable[[int, int], frozenset[int]] = begins.get(goal, lambda rank, _: frozenset([rank]))
    return [[Copy(begin(rank, chunk), ("own", rank, chunk)) for chunk in range(chunks)] for rank in range(ranks)]


def _required(rank: int, chunk: int, ranks: int, goal: Goal) -> frozenset[int] | None:
    """Return the required contents of a chunk at the end; None if any will do."""
    if goal is Goal.ALL_TO_ALL:
        sender = chunk - ranks
        return frozenset([sender * ranks + rank]) if 0 <= sender < ranks and sender != rank else None
    here = {Goal.REDUCE_SCATTER: chunk == rank, Goal.REDUCE: rank == 0}.get(goal, True)
    return frozenset(range(ranks)) if here else None


def _describe_error(contributions: frozenset[int], required: frozenset[int], goal: Goal) -> str:
    if goal is Goal.ALL_TO_ALL:
        return f"holding {sorted(contributions)}, not {sorted(required)}"
    if missing := sorted(required - contributions):
        return f"lacking the contributions of ranks {missing}"
    return "summed with what lay there before"


class Copy(NamedTuple):
    """Copy of a chunk on one rank."""

    contributions: frozenset[int]
    """Ranks whose contributions are in it. For all_to_all, the chunk from s for d is number s p + d."""
    history: tuple[object, ...]
    """Sums that made it, from its beginning, and where it was rounded."""

    def rounded(self) -> Copy:
        """Return the copy after a wire has rounded it; a second time changes nothing."""
        return self if self.history[0] == "rounded" else self._replace(history=("rounded", self.history))


Held = list[list[Copy]]
"""Copies of all chunks, by rank."""

Sent = defaultdict[tuple[int, int, int], deque[list[Copy]]]
"""Copies in messages that are under way, by lane, sender and receiver, the oldest first."""

Rounding = Callable[[int, int], bool]
"""Function (sender, receiver) that returns True where a wire rounds what goes between them: everywhere, or between
nodes where the program distinguishes nodes (`landing_remote`)."""


def _end(place: RoundRef, transfers: Round, sent: Sent, copies: list[Copy]) -> None:
    """End a round: sum and replace chunks. Raises ScheduleError for a contribution that is there already."""
    terms: dict[int, list[tuple[int, object]]] = {}  # (rank, history) of what is summed into a chunk
    for action, peer, first, _ in transfers:
        message = sent[place.lane, peer, place.rank].popleft() if action is not Action.SEND else ()
        for chunk, copy in enumerate(message, first):
            if action is not Action.ADD:
                copies[chunk] = copy
                continue
            own_copy = copies[chunk]
            if twice := own_copy.contributions & copy.contributions:
                raise ScheduleError(f"{place}: chunk {chunk} gets the contributions of {sorted(twice)} twice")
            terms.setdefault(chunk, [(place.rank, own_copy.history)]).append((peer, copy.history))
            copies[chunk] = own_copy._replace(contributions=own_copy.contributions | copy.contributions)
    for chunk, summed in terms.items():
        in_rank_order = [history for _, history in sorted(summed, key=itemgetter(0))]
        history = frozenset(in_rank_order) if len(summed) == 2 else tuple(in_rank_order)  # a + b has the bits of b + a
        copies[chunk] = copies[chunk]._replace(history=("sum", history))


def check_program(rank: int, ranks: int, program: Program, first: Program) -> None:
    """Raise ScheduleError for errors in one program: a shape unlike rank 0's, or transfers that race for a chunk."""
    chunks = first.chunks
    if program.chunks != chunks:
        raise ScheduleError(f"rank {rank} cuts the payload into {program.chunks} chunks, rank 0 into {chunks}")
    if program._replace(lanes=()) != first._replace(lanes=()) or len(program.lanes) != len(first.lanes):
        shapes = [{**p._asdict(), "lanes": len(p.lanes)} for p in (program, first)]
        unlike = [field for field in Program._fields if shapes[0][field] != shapes[1][field]]
        of_rank, of_first = (", ".join(f"{field} = {shape[field]}" for field in unlike) for shape in shapes)
        raise ScheduleError(f"rank {rank} has {of_rank}; rank 0 has {of_first}; all ranks have the same")
    if len(program.lanes) % program.columns:
        raise ScheduleError(f"{len(program.lanes)} lanes do not make {program.columns} columns of equal width")
    lane_of_chunk: dict[int, int] = {}
    for lane_number, lane in enumerate(program.lanes):
        for round_number, transfers in enumerate(lane):
            where = str(RoundRef(rank, lane_number, round_number))
            if not transfers:
                raise ScheduleError(f"{where} has no transfers: leave the round out")
            for transfer in transfers:
                last = transfer.chunk + transfer.span - 1
                if transfer.peer == rank or not 0 <= transfer.peer < ranks:
                    raise ScheduleError(f"{where}: {describe(transfer)}: no such peer among {ranks} ranks")
                if transfer.span < 1 or not 0 <= transfer.chunk <= last < chunks:
                    raise ScheduleError(f"{where}: {describe(transfer)}: no such chunks among {chunks}")
                for chunk in range(transfer.chunk, last + 1):
                    if lane_of_chunk.setdefault(chunk, lane_number) != lane_number:
                        raise ScheduleError(f"{where}: chunk {chunk} belongs to lane {lane_of_chunk[chunk]}")
            _check_races(where, transfers)
            landing = sum(transfer.span for transfer in transfers if transfer.action is Action.ADD)
            if landing > program.landing:
                raise ScheduleError(
                    f"{where}: {landing} chunks are received at once; the program's limit is {program.landing}"
                )


def check_placement(rank: int, program: Program, placement: Placement) -> None:
    """Check the fields of a program that depend on the placement: `columns`, `landing_remote` and `steady`."""
    a_column, node = len(program.lanes) // program.columns, placement.node_of(rank)
    adding = {
        index // a_column
        for index, lane in enumerate(program.lanes)
        if any(move.action is Action.ADD for moves in lane for move in moves)
    }
    if program.columns > 1 and len(adding) > 1:
        raise ScheduleError(f"rank {rank} adds in the lanes of columns {sorted(adding)}; at most one is allowed")
    sources = set[int]()
    for moves in (moves for lane in program.lanes for moves in lane):
        far = [move for move in moves if move.action is not Action.SEND and placement.node_of(move.peer) != node]
        sources |= {move.peer for move in far}
        landing = sum(move.span for move in far if move.action is Action.ADD)
        if program.landing_remote is not None and landing > program.landing_remote:
            raise ScheduleError(
                f"rank {rank}: {landing} chunks are received at once from other nodes; "
                f"the program's limit is {program.landing_remote}"
            )
    if program.steady and len(sources) > 2:
        raise ScheduleError(
            f"rank {rank} receives from ranks {sorted(sources)} of other nodes, which is not steady: set steady=False, "
            "or let each rank receive from at most 2"
        )


def _check_races(where: str, transfers: Round) -> None:
    """Refuse a RECEIVE that shares chunks, and two ADDs whose chunks partly overlap; rule 2 allows the rest."""
    for first, second in combinations(transfers, 2):
        overlap = first.chunk < second.chunk + second.span and second.chunk < first.chunk + first.span
        actions = {first.action, second.action}
        same = (first.chunk, first.span) == (second.chunk, second.span)
        if overlap and (Action.RECEIVE in actions or (actions == {Action.ADD} and not same)):
            raise ScheduleError(f"{where}: {describe(first)} and {describe(second)} race for a chunk")
