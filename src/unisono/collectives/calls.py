"""The calls of one world on this rank: the current call, recent calls, and the error that ended the world."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from unisono.errors import UnisonoError
from unisono.mpi import MPI
from unisono.transports.signals import Signals

CALLS_KEPT = 256
"""Number of recent calls that a rank keeps."""


class CurrentCall(NamedTuple):
    """A call that a rank is in and may wait in."""

    number: int
    description: str
    in_library: bool


class CallProgress:
    """Time that a rank has spent in one call, and what its watch has already done about it."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, call_number: int) -> None:
        """Start counting for another call."""
        self.number, self._since = call_number, time.monotonic()
        self.compared = self.notified = self.reported = False
        self.queried: float | None = None
        """Time at which all ranks were queried; None unless answers are expected."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since


class Calls:
    """The calls of a world.

    A world within one node counts its barriers (`signals`) and the calls made without one; a world across nodes counts
    its calls. `ranks` are the members' ranks in the job.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, ranks
        self.timeout: float | None = None
        """Seconds after which a wait in a call is ended; None for the time-out of the job."""
        self.number = 0
        """Number of the last call that was begun."""
        self.busy, self.in_library = False, False
        self.signals: Signals | None = None
        self.channels: tuple[MPI.Intracomm, ...] = ()
        """Communicators in which the calls may wait."""
        self.failure: tuple[type[UnisonoError], str] | None = None
        """Error that has ended the world, as its class and its message; None while the world is usable."""
        self.progress = CallProgress()
        """Progress of the current call, as its watch has seen it."""
        self._descriptions = [""] * CALLS_KEPT  # of call n at index n % CALLS_KEPT

    @contextmanager
    def enter(self, description: str, in_library: bool = False) -> Iterator[int]:
        """Enter a call, or a part of one; yield its fingerprint."""
        outer = self.begin(description, in_library)
        try:
            yield self.fingerprint(description)
        finally:
            self.end(outer)

    def fingerprint(self, description: str) -> int:
        """Return a number that is equal on all ranks in the same call."""
        return zlib.crc32(description.encode(), self.number)

    def begin(self, description: str, in_library: bool) -> tuple[bool, bool]:
        """Begin a call, or a part of one; return the argument for `end`. Kept fast, because short calls notice it."""
        if self.failure:
            self.check()
        outer = self.busy, self.in_library
        if not self.busy:
            call_number = self.number + 1
            self._descriptions[call_number % CALLS_KEPT] = description
            self.number, self.busy = call_number, True
        self.in_library = in_library
        return outer

    def end(self, outer: tuple[bool, bool]) -> None:
        """End the call, or the part, that `begin` began."""
        self.busy, self.in_library = outer

    def check(self) -> None:
        """Raise the error that has ended the world, if any."""
        if self.failure is not None:
            kind, message = self.failure
            raise kind(message)

    def fail(self, kind: type[UnisonoError], message: str) -> None:
        """End the world: waits and all later calls raise this error."""
        self.failure = self.failure or (kind, message)
        if self.signals is not None:
            self.signals.end()

    def description(self, call_number: int) -> str:
        """Return the description of a call by its number; empty if it is no longer kept or not yet begun."""
        is_kept = self.number - CALLS_KEPT < call_number <= self.number
        return self._descriptions[call_number % CALLS_KEPT] if is_kept else ""

    @property
    def position(self) -> int:
        """Number of calls and barriers that this rank has entered: equal on ranks at the same point of the program."""
        signals = self.signals
        return self.number + (0 if signals is None else signals.sequence)

    @property
    def current(self) -> CurrentCall | None:
        """The call that this rank is in, if it may wait there; else None."""
        position, signals = self.position, self.signals
        if self.busy:
            return CurrentCall(position, self.description(self.number), self.in_library)
        waiting = None if signals is None else signals.waiting
        return None if waiting is None else CurrentCall(position, waiting.description, False)
