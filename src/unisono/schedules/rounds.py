"""Order of a schedule's rounds: the messages between them, and the step in which each begins.

A message takes one step: the first in which both ends are in the rounds that name it. A round begins one step after the
last message of the round before:

    rank 0    round 0: sums from 1 and 2                      1 sends in step 0; 2 has to sum from 3 first, and sends in
    rank 2    round 0: sums from 3   round 1: sends to 0      step 1: there round 0 of rank 0 ends
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from typing import NamedTuple

from unisono.errors import ScheduleError
from unisono.schedules.schedule import Action, Program, Round, Transfer


class RoundRef(NamedTuple):
    """Place of a round in a schedule."""

    rank: int
    lane: int
    round: int

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, round {self.round}"


class MatchedMessage(NamedTuple):
    """Message between two rounds, as each of them names it."""

    sender: RoundRef
    receiver: RoundRef
    sent: Transfer
    received: Transfer


def rounds_of(programs: Sequence[Program]) -> dict[RoundRef, Round]:
    return {
        RoundRef(rank, lane, index): transfers
        for rank, program in enumerate(programs)
        for lane, rounds in enumerate(program.lanes)
        for index, transfers in enumerate(rounds)
    }


def messages_of(programs: Sequence[Program]) -> list[MatchedMessage]:
    """Return all messages, matched in order between two ranks in a lane. Raises ScheduleError for a transfer without
    another end."""
    rounds = rounds_of(programs)
    sent, received = defaultdict(list), defaultdict(list)
    for place, transfers in rounds.items():
        for transfer in transfers:
            if transfer.action is Action.SEND:
                sent[place.lane, place.rank, transfer.peer].append((place, transfer))
            else:
                received[place.lane, transfer.peer, place.rank].append((place, transfer))
    messages = []
    for channel in {**sent, **received}:
        for start, stop in zip_longest(sent[channel], received[channel]):
            if start is None or stop is None:
                place, _ = start or stop
                raise _waiting(place, rounds[place])
            messages.append(MatchedMessage(start[0], stop[0], start[1], stop[1]))
    return messages


def begins_of(programs: Sequence[Program], messages: Iterable[MatchedMessage]) -> dict[RoundRef, int]:
    """Return the step in which each round begins, in an order in which they can. Raises ScheduleError if ranks would
    wait for each other forever."""
    rounds, begins = rounds_of(programs), dict[RoundRef, int]()
    before = {place: {place._replace(round=place.round - 1)} if place.round else set() for place in rounds}
    for sender, receiver, *_ in messages:
        for end, partner in ((sender, receiver), (receiver, sender)):
            following = end._replace(round=end.round + 1)
            if following in before:
                before[following].add(partner)
    try:
        for place in TopologicalSorter(before).static_order():
            begins[place] = 1 + max((begins[partner] for partner in before[place]), default=-1)
    except CycleError as error:
        stuck = max(error.args[1], key=lambda place: place.round)
        place = stuck._replace(round=stuck.round - 1)
        raise _waiting(place, rounds[place]) from None
    return begins


def _waiting(place: RoundRef, transfers: Round) -> ScheduleError:
    return ScheduleError(f"{place} waits forever: {', '.join(map(describe, transfers))}")


def describe(transfer: Transfer) -> str:
    return f"{transfer.action.value} chunk {transfer.chunk} span {transfer.span} peer {transfer.peer}"
