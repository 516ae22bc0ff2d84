"""Run of a schedule on contributions and histories instead of numbers: all ranks side by side, in one process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from unisono.errors import ScheduleError
from unisono.schedules.program_checks import describe
from unisono.schedules.schedule import Action, Program, Round


class Copy(NamedTuple):
    """Copy of a chunk on one rank."""

    contributions: frozenset[int]
    """Ranks whose contributions are in it. For all_to_all, the chunk from s for d is number s p + d."""
    history: int
    """Number of its history."""


Held = list[list[Copy]]
"""Copies of all chunks, by rank."""

Rounding = Callable[[int, int], bool]
"""Function (sender, receiver) that returns True where a wire rounds what goes between them: everywhere, or between
nodes where the program distinguishes nodes (`landing_remote`)."""


class _InFlight(NamedTuple):
    chunk: int
    span: int
    copies: tuple[Copy, ...]


class Histories:
    """Numbers of histories: equal ones have one number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._rounded: set[int] = set()

    def of(self, *what: object) -> int:
        """Return the number of a history."""
        return self._numbers.setdefault(what, len(self._numbers))

    def rounded(self, history: int) -> int:
        """Return the history after a wire has rounded it; a second time changes nothing."""
        if history in self._rounded:
            return history
        number = self.of("rounded", history)
        self._rounded.add(number)
        return number


class SymbolicRun:
    """Run of all ranks side by side, one round at a time for each lane."""

    def __init__(
        self, programs: list[Program], held: Held, same_chunks: bool, histories: Histories, rounds: Rounding
    ) -> None:
        self.programs, self.held = programs, held
        self.histories, self.rounds = histories, rounds
        self.same_chunks = same_chunks  # whether both ends of a transfer name the same
        self.lanes = [(rank, lane) for rank, program in enumerate(programs) for lane in range(len(program.lanes))]
        self.position = dict.fromkeys(self.lanes, 0)
        self.sent: dict[tuple[int, int, int], deque[_InFlight]] = defaultdict(deque)  # (from, to, lane): oldest first
        self.pending_sends = dict.fromkeys(self.lanes, 0)  # messages of the current round that no rank has received yet
        self.arrived: dict[tuple[int, int], list[_InFlight | None]] = {}

    def finish(self) -> None:
        """Pass messages until every lane has ended; raise ScheduleError if a lane cannot."""
        for rank, lane in self.lanes:
            self._enter(rank, lane)
        moving = True
        while moving:
            moving = sum(self._advance(rank, lane) for rank, lane in self.lanes) > 0
        for rank, lane in self.lanes:
            if transfers := self._transfers(rank, lane):
                waits = ", ".join(describe(transfer) for transfer in transfers)
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
                own = self.held[rank]
                if self.rounds(rank, peer):
                    for place in range(chunk, chunk + span):
                        own[place] = own[place]._replace(history=self.histories.rounded(own[place].history))
                self.sent[rank, peer, lane].append(_InFlight(chunk, span, tuple(own[chunk : chunk + span])))
                self.pending_sends[rank, lane] += 1

    def _advance(self, rank: int, lane: int) -> bool:
        """Receive available messages, and end the round if it is complete; return True if anything moved."""
        transfers = self._transfers(rank, lane)
        if transfers is None:
            return False
        moved = False
        arrived = self.arrived[rank, lane]
        for index, transfer in enumerate(transfers):
            queue = self.sent[transfer.peer, rank, lane]
            if transfer.action is not Action.SEND and arrived[index] is None and queue:
                message = arrived[index] = queue.popleft()
                if message.span != transfer.span or (self.same_chunks and message.chunk != transfer.chunk):
                    got = f"a message of chunk {message.chunk} span {message.span}"
                    raise ScheduleError(f"{self._where(rank, lane)}: {describe(transfer)} is matched by {got}")
                self.pending_sends[transfer.peer, lane] -= 1
                moved = True
        expected = sum(transfer.action is not Action.SEND for transfer in transfers)
        if self.pending_sends[rank, lane] or expected > sum(message is not None for message in arrived):
            return moved
        _apply(rank, self._where(rank, lane), transfers, arrived, self.held[rank], self.histories)
        self.position[rank, lane] += 1
        self._enter(rank, lane)
        return True


def _apply(
    rank: int,
    where: str,
    transfers: Round,
    messages: list[_InFlight | None],
    copies: list[Copy],
    histories: Histories,
) -> None:
    """End a round: sum and replace chunks. Raises ScheduleError for a contribution that is there already."""
    terms: dict[int, list[tuple[int, int]]] = {}  # (rank, history) of what is summed into a chunk
    for transfer, message in zip(transfers, messages, strict=True):
        if message is None:
            continue
        for chunk, copy in enumerate(message.copies, transfer.chunk):
            if transfer.action is not Action.ADD:
                copies[chunk] = copy
                continue
            own = copies[chunk]
            if twice := own.contributions & copy.contributions:
                raise ScheduleError(f"{where}: chunk {chunk} gets the contributions of {sorted(twice)} twice")
            terms.setdefault(chunk, [(rank, own.history)]).append((transfer.peer, copy.history))
            copies[chunk] = own._replace(contributions=own.contributions | copy.contributions)
    for chunk, summed in terms.items():
        in_rank_order = [history for _, history in sorted(summed)]
        if len(in_rank_order) == 2:  # a + b has the bits of b + a
            in_rank_order.sort()
        copies[chunk] = copies[chunk]._replace(history=histories.of("sum", *in_rank_order))
