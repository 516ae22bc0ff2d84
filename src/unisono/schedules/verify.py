"""Proof that a schedule is correct for one number of ranks, by running it on sets of contributions instead of numbers.

Every chunk on every rank holds the set of ranks whose contributions are in it. Messages are passed only when both ends
are in the round that names them (rule 3 of `schedule.py`), so a schedule that passes needs no buffering.

    allreduce        begins {r} everywhere,                ends {0..p-1} in every chunk of every rank
    reduce_scatter      begins {r} everywhere,                ends {0..p-1} in chunk r of rank r
    all_gather   begins {0..p-1} in chunk r of rank r, ends {0..p-1} in every chunk of every rank
    broadcast        begins {0..p-1} in all of rank 0,     ends {0..p-1} in every chunk of every rank
    all_to_all       begins {r to d} in chunk d of rank r, ends {s to r} in chunk p+s of rank r, for all s but r

A chunk that "begins" does not name holds old memory contents, so that adding to it is detected, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from enum import Enum
from itertools import combinations
from typing import NamedTuple

from unisono.errors import ScheduleError
from unisono.placement import Placement, apart
from unisono.schedules.schedule import Action, Algorithm, Program, Round, Transfer

Held = list[list[frozenset[int]]]
"""Contributions in each chunk of each rank, by rank. For all_to_all, the chunk from s for d is number s p + d."""

_BEFORE = frozenset([-1])
"""Contents of a chunk that no rank has set."""


class Goal(Enum):
    """Collective that a schedule carries out."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"


class _Message(NamedTuple):
    chunk: int
    span: int
    contents: tuple[frozenset[int], ...]


def verify(algorithm: Algorithm, ranks: int, goal: Goal = Goal.ALLREDUCE, placement: Placement | None = None) -> None:
    """Raise ScheduleError unless the schedule reaches its goal on `ranks` ranks, by default with one rank per node.

    Checks that every contribution arrives exactly once, no rank waits forever, no message is left over, messages are
    received in the order and shape they were sent, and no two transfers race for a chunk. Costs O(ranks^2 x chunks).
    """
    programs = [algorithm(rank, ranks) for rank in range(ranks)]
    for rank, program in enumerate(programs):
        _check_alone(rank, ranks, program, programs[0])
        _check_places(rank, program, placement or apart(ranks))
    held = _begin(ranks, programs[0].chunks, goal)
    _Run(programs, held, same_chunks=goal is not Goal.ALL_TO_ALL).finish()
    for rank, chunks in enumerate(held):
        for chunk, contributions in enumerate(chunks):
            wanted = _wanted(rank, chunk, ranks, goal)
            if wanted is not None and contributions != wanted:
                raise ScheduleError(f"rank {rank} ends with chunk {chunk} {_wrong(contributions, wanted, goal)}")


def _begin(ranks: int, chunks: int, goal: Goal) -> Held:
    needed = {Goal.REDUCE_SCATTER: ranks, Goal.ALL_GATHER: ranks, Goal.ALL_TO_ALL: 2 * ranks}.get(goal, chunks)
    if chunks != needed:
        raise ScheduleError(f"{goal.value} on {ranks} ranks needs {needed} chunks, not {chunks}")
    everyone = frozenset(range(ranks))

    def first(rank: int, chunk: int) -> frozenset[int]:
        match goal:
            case Goal.ALL_GATHER:
                return everyone if chunk == rank else _BEFORE
            case Goal.BROADCAST:
                return everyone if rank == 0 else _BEFORE
            case Goal.ALL_TO_ALL:
                return frozenset([rank * ranks + chunk]) if chunk < ranks else _BEFORE
        return frozenset([rank])

    return [[first(rank, chunk) for chunk in range(chunks)] for rank in range(ranks)]


def _wanted(rank: int, chunk: int, ranks: int, goal: Goal) -> frozenset[int] | None:
    """Return the required contents of a chunk at the end; None if any will do."""
    if goal is Goal.ALL_TO_ALL:
        sender = chunk - ranks
        return frozenset([sender * ranks + rank]) if sender >= 0 and sender != rank else None
    return frozenset(range(ranks)) if goal is not Goal.REDUCE_SCATTER or chunk == rank else None


def _wrong(contributions: frozenset[int], wanted: frozenset[int], goal: Goal) -> str:
    if goal is Goal.ALL_TO_ALL:
        return f"holding {sorted(contributions)}, not {sorted(wanted)}"
    if missing := sorted(wanted - contributions):
        return f"lacking the contributions of ranks {missing}"
    return "summed with what lay there before"


def _check_alone(rank: int, ranks: int, program: Program, first: Program) -> None:
    """Raise ScheduleError for errors in one program: a shape unlike rank 0's, or transfers that race for a chunk."""
    chunks = first.chunks
    if program.chunks != chunks:
        raise ScheduleError(f"rank {rank} cuts the payload into {program.chunks} chunks, rank 0 into {chunks}")
    if program._replace(lanes=()) != first._replace(lanes=()) or len(program.lanes) != len(first.lanes):
        shapes = [
            f"{len(p.lanes)} lanes, {p.landing} chunks that land at once, {'' if p.steady else 'not '}steady"
            for p in (program, first)
        ]
        raise ScheduleError(f"rank {rank} has {shapes[0]}; rank 0 has {shapes[1]}")
    lane_of_chunk: dict[int, int] = {}
    for lane_number, lane in enumerate(program.lanes):
        for round_number, transfers in enumerate(lane):
            where = f"rank {rank}, lane {lane_number}, round {round_number}"
            for transfer in transfers:
                last = transfer.chunk + transfer.span - 1
                if transfer.peer == rank or not 0 <= transfer.peer < ranks:
                    raise ScheduleError(f"{where}: {_say(transfer)}: no such peer among {ranks} ranks")
                if transfer.span < 1 or not 0 <= transfer.chunk <= last < chunks:
                    raise ScheduleError(f"{where}: {_say(transfer)}: no such chunks among {chunks}")
                for chunk in range(transfer.chunk, last + 1):
                    if lane_of_chunk.setdefault(chunk, lane_number) != lane_number:
                        raise ScheduleError(f"{where}: chunk {chunk} belongs to lane {lane_of_chunk[chunk]}")
            _check_races(where, transfers)
            landing = sum(transfer.span for transfer in transfers if transfer.action is Action.ADD)
            if landing > program.landing:
                raise ScheduleError(f"{where}: {landing} chunks land at once, the program says {program.landing}")


def _check_places(rank: int, program: Program, placement: Placement) -> None:
    """Check the fields of a program that depend on the placement: `columns`, `landing_far` and `steady`."""
    a_column = len(program.lanes) // program.columns
    adding = {
        number // a_column
        for number, lane in enumerate(program.lanes)
        if any(move.action is Action.ADD for moves in lane for move in moves)
    }
    if program.columns > 1 and len(adding) > 1:
        raise ScheduleError(f"rank {rank} adds in the lanes of columns {sorted(adding)}, a rank does in one at most")
    node = placement.node_of(rank)
    for moves in (moves for lane in program.lanes for moves in lane):
        from_far = [t.span for t in moves if t.action is Action.ADD and placement.node_of(t.peer) != node]
        if program.landing_far is not None and sum(from_far) > program.landing_far:
            landing = f"{sum(from_far)} chunks land at once from other nodes"
            raise ScheduleError(f"rank {rank}: {landing}, the program says {program.landing_far}")
    heard = {move.peer for lane in program.lanes for moves in lane for move in moves if move.action is not Action.SEND}
    far = sorted(peer for peer in heard if placement.node_of(peer) != placement.node_of(rank))
    if program.steady and len(far) > 2:
        raise ScheduleError(f"rank {rank} hears from ranks {far} of other nodes, which is not steady")


def _check_races(where: str, transfers: Round) -> None:
    """Refuse a RECEIVE that shares chunks, and two ADDs whose chunks partly overlap; rule 2 allows the rest."""
    for one, other in combinations(transfers, 2):
        overlap = one.chunk < other.chunk + other.span and other.chunk < one.chunk + one.span
        actions = {one.action, other.action}
        same = (one.chunk, one.span) == (other.chunk, other.span)
        if overlap and (Action.RECEIVE in actions or (actions == {Action.ADD} and not same)):
            raise ScheduleError(f"{where}: {_say(one)} and {_say(other)} race for a chunk")


class _Run:
    """Run of all ranks side by side, one round at a time for each lane."""

    def __init__(self, programs: list[Program], held: Held, same_chunks: bool) -> None:
        self.programs, self.held = programs, held
        self.same_chunks = same_chunks  # whether both ends of a transfer name the same
        self.lanes = [(rank, lane) for rank, program in enumerate(programs) for lane in range(len(program.lanes))]
        self.position = dict.fromkeys(self.lanes, 0)
        self.sent: dict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)  # (from, to, lane): oldest first
        self.untaken = dict.fromkeys(self.lanes, 0)  # messages of the present round that nobody has taken yet
        self.arrived: dict[tuple[int, int], list[_Message | None]] = {}

    def finish(self) -> None:
        """Pass messages until every lane has ended; raise ScheduleError if a lane cannot."""
        for rank, lane in self.lanes:
            self._enter(rank, lane)
        moving = True
        while moving:
            moving = sum(self._advance(rank, lane) for rank, lane in self.lanes) > 0
        for rank, lane in self.lanes:
            if transfers := self._transfers(rank, lane):
                waits = ", ".join(_say(transfer) for transfer in transfers)
                raise ScheduleError(f"{self._where(rank, lane)} waits forever: {waits}")

    def _transfers(self, rank: int, lane: int) -> Round | None:
        rounds, position = self.programs[rank].lanes[lane], self.position[rank, lane]
        return rounds[position] if position < len(rounds) else None

    def _where(self, rank: int, lane: int) -> str:
        return f"rank {rank}, lane {lane}, round {self.position[rank, lane]}"

    def _enter(self, rank: int, lane: int) -> None:
        """Begin the current round: its messages can be received from now on."""
        transfers = self._transfers(rank, lane) or ()
        self.arrived[rank, lane] = [None] * len(transfers)
        for action, peer, chunk, span in transfers:
            if action is Action.SEND:
                contents = tuple(self.held[rank][chunk : chunk + span])
                self.sent[rank, peer, lane].append(_Message(chunk, span, contents))
                self.untaken[rank, lane] += 1

    def _advance(self, rank: int, lane: int) -> bool:
        """Receive available messages, and end the round if it is complete; return True if anything moved."""
        transfers = self._transfers(rank, lane)
        if transfers is None:
            return False
        moved = False
        arrived = self.arrived[rank, lane]
        for index, transfer in enumerate(transfers):
            on_offer = self.sent[transfer.peer, rank, lane]
            if transfer.action is not Action.SEND and arrived[index] is None and on_offer:
                message = arrived[index] = on_offer.popleft()
                if message.span != transfer.span or (self.same_chunks and message.chunk != transfer.chunk):
                    got = f"a message of chunk {message.chunk} span {message.span}"
                    raise ScheduleError(f"{self._where(rank, lane)}: {_say(transfer)} meets {got}")
                self.untaken[transfer.peer, lane] -= 1
                moved = True
        expected = sum(transfer.action is not Action.SEND for transfer in transfers)
        if self.untaken[rank, lane] or expected > sum(message is not None for message in arrived):
            return moved
        _put(self._where(rank, lane), transfers, arrived, self.held[rank])
        self.position[rank, lane] += 1
        self._enter(rank, lane)
        return True


def _put(where: str, transfers: Round, messages: list[_Message | None], chunks: list[frozenset[int]]) -> None:
    """End a round: sum and replace chunks. Raises ScheduleError for a contribution that is there already."""
    for transfer, message in zip(transfers, messages, strict=True):
        if message is None:
            continue
        for chunk, contributions in enumerate(message.contents, transfer.chunk):
            if transfer.action is Action.ADD:
                twice = chunks[chunk] & contributions
                if twice:
                    raise ScheduleError(f"{where}: chunk {chunk} gets the contributions of {sorted(twice)} twice")
                chunks[chunk] |= contributions
            else:
                chunks[chunk] = contributions


def _say(transfer: Transfer) -> str:
    return f"{transfer.action.value} chunk {transfer.chunk} span {transfer.span} peer {transfer.peer}"
