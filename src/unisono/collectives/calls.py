"""The calls of one world as this rank makes them: what it is in, what it was in, and what has ended the world."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from unisono.errors import UnisonoError
from unisono.transports.signals import Signals

REMEMBERED = 256
"""Calls that a rank remembers."""


class Busy(NamedTuple):
    """A call that a rank is in, and may wait in."""

    number: int
    words: str
    in_library: bool


class Progress:
    """How long a rank has been in one call, and what was done about it."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, number: int) -> None:
        """Begin to count for another call."""
        self.number, self._since = number, time.monotonic()
        self.compared = self.told = self.reported = False
        self.asked: float | None = None
        """When all ranks were asked, while their answers are awaited."""

    @property
    def seconds(self) -> float:
        """Seconds in this call."""
        return time.monotonic() - self._since


class Calls:
    """The calls of a world.

    A world whose ranks share a node counts its meetings (`signals`), and beside them what is done without; one across
    nodes counts its calls. `ranks` are the members' numbers in the job.
    """

    def __init__(self, name: str, ranks: Sequence[int], ends: bool) -> None:
        self.name, self.ranks = name, ranks
        self.ends = ends
        """Whether a wait may be ended by the time-out of the job; else the program has its own."""
        self.number = 0
        """The last call that was begun."""
        self.busy, self.in_library = False, False
        self.signals: Signals | None = None
        self.failure: tuple[type[UnisonoError], str] | None = None
        """What has ended the world for good."""
        self._words = [""] * REMEMBERED  # of call n at place n % REMEMBERED

    @contextmanager
    def over(self, words: str, in_library: bool = False) -> Iterator[int]:
        """A call, or a part of one; gives a number that ranks in the same call have in common."""
        outer = self.begin(words, in_library)
        try:
            yield zlib.crc32(words.encode(), self.number)
        finally:
            self.end(outer)

    def begin(self, words: str, in_library: bool) -> tuple[bool, bool]:
        """Begin a call, or a part of one; return what `end` wants. For short calls the time that this takes counts."""
        if self.failure:
            self.check()
        outer = self.busy, self.in_library
        if not self.busy:
            number = self.number + 1
            self._words[number % REMEMBERED] = words
            self.number, self.busy = number, True
        self.in_library = in_library
        return outer

    def end(self, outer: tuple[bool, bool]) -> None:
        """End what `begin` began."""
        self.busy, self.in_library = outer

    def check(self) -> None:
        """Raise what has ended the world."""
        if self.failure is not None:
            kind, words = self.failure
            raise kind(words)

    def fail(self, kind: type[UnisonoError], words: str) -> None:
        """End the world for good: waits and later calls raise."""
        self.failure = self.failure or (kind, words)
        if self.signals is not None:
            self.signals.end()

    def words(self, number: int) -> str:
        """The call of that number, in words; empty when it was long ago, or is to come."""
        return self._words[number % REMEMBERED] if self.number - REMEMBERED < number <= self.number else ""

    @property
    def position(self) -> int:
        """How many calls and meetings this rank has come to: the same on all ranks that have come equally far."""
        signals = self.signals
        return self.number + (0 if signals is None else signals.turn)

    @property
    def current(self) -> Busy | None:
        """The call that this rank is in, if it may wait there."""
        position, signals = self.position, self.signals
        if self.busy:
            return Busy(position, self.words(self.number), self.in_library)
        waiting = None if signals is None else signals.waiting
        return None if waiting is None else Busy(position, waiting.words, False)
