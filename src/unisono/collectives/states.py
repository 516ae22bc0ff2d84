"""Calls of each world on this rank; states that ranks report when one waits for long, and the messages made of them.

rank 0   waits 10 s in call 7 of world   ── query ──▶  all ranks
rank 1   State: world is at call 6, waits in call 3 of "dup 1 of world", at train.py:12
rank 2   no answer; its process is stopped

"rank 0 of 3 has waited 10 s in allreduce(5 x float32), call 7 of world, at train.py:11; missing: rank 1, which waits
 in barrier(), call 3 of dup 1 of world, at train.py:12; rank 2, which is stopped ..."

Messages are made by pure functions. `call_site` is the line at which the main thread is in the user's program, outside
of unisono, PyTorch and Python.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from unisono.errors import UnisonoError
from unisono.mpi import MPI
from unisono.transports.barriers import Signals
from unisono.uncaught import is_of_program

MAX_LISTED_RANKS = 8
"""Largest number of ranks that are described one by one."""

ENDED_REMEDY = "every rank of a world must make as many calls as the others"

TIMEOUT_REMEDY = "every rank must make the same calls; more time: UNISONO_TIMEOUT or unisono.init(timeout=SECONDS)"


class Wait(NamedTuple):
    """A call in which a rank waits."""

    world: str
    number: int
    description: str
    seconds: float = 0.0


class State(NamedTuple):
    """State that a rank reports of itself."""

    call_site: str
    """File and line of its main thread."""
    waits: tuple[Wait, ...] = ()
    numbers: Mapping[str, int] = {}
    """Number of calls that the rank has entered, by name of the world."""
    broken: Mapping[str, str] = {}
    """Names of the worlds that an error has ended on this rank, with its message if two ranks differ, else ""."""
    ended: bool = False


STOPPED, DEAD, SILENT = "stopped", "dead", "silent"

Answer = State | str
"""Answer of a rank: its state, or STOPPED or DEAD for its process, or SILENT if nothing is known."""


def missing_ranks(wait: Wait, other_ranks: Sequence[int], answers: Mapping[int, Answer]) -> list[int]:
    """Return the ranks that have not entered a call; if all have, those that do not wait in a call of its world."""

    def late(answer: Answer) -> bool:
        return not isinstance(answer, State) or answer.numbers.get(wait.world, 0) < wait.number

    def elsewhere(answer: Answer) -> bool:
        return late(answer) or answer.ended or all(theirs.world != wait.world for theirs in answer.waits)  # type: ignore[union-attr]

    return [rank for rank in other_ranks if late(answers.get(rank, SILENT))] or [
        rank for rank in other_ranks if elsewhere(answers.get(rank, SILENT))
    ]


def is_hopeless(wait: Wait, answer: Answer) -> bool:
    """Return True if a rank that has not entered the call never will."""
    if isinstance(answer, State):  # one that has ended and no longer knows the world may have entered the call before
        return (answer.ended and wait.world in answer.numbers) or wait.world in answer.broken
    return answer == DEAD


def is_reporter(rank: int, wait: Wait, answers: Mapping[int, Answer]) -> bool:
    """Return True if `rank` is to report the wait: if no lower rank has waited in that call for over half as long."""
    lower = [answer for peer, answer in answers.items() if peer < rank and isinstance(answer, State)]
    waits = [theirs for answer in lower for theirs in answer.waits if theirs[:2] == wait[:2]]
    return all(theirs.seconds <= wait.seconds / 2 for theirs in waits)


def report(
    rank: int, size: int, wait: Wait, call_site: str, missing: Sequence[int], answers: Mapping[int, Answer]
) -> str:
    listed, more = missing[:MAX_LISTED_RANKS], len(missing) - MAX_LISTED_RANKS
    each = [f"rank {peer}, which {_describe_activity(wait, answers.get(peer, SILENT))}" for peer in listed]
    who = "; ".join([*each, f"and {more} more"] if more > 0 else each)
    where = f"missing: {who}" if missing else "all ranks have entered it, and wait"
    return f"rank {rank} of {size} has waited {wait.seconds:.0f} s in {describe(wait)}{_at(call_site)}; {where}"


def failure(report: str, hopeless: bool, timeout: float | None) -> str:
    """Return the error message of a rank whose wait is ended; `timeout` is that of its world, None for the job's."""
    if timeout is not None and not hopeless:
        return f"Timed out after {timeout:g} s: {report}"
    return f"{report}: {ENDED_REMEDY if hopeless else TIMEOUT_REMEDY}"


def describe(wait: Wait) -> str:
    return f"{wait.description}, call {wait.number} of {wait.world}"


NO_STATE = {
    STOPPED: "is stopped (by SIGSTOP or a debugger; kill -CONT resumes it)",
    DEAD: "is dead",
    SILENT: "does not respond",
}


def _describe_activity(wait: Wait, answer: Answer) -> str:
    if not isinstance(answer, State):
        return NO_STATE[answer]
    if answer.ended:
        return "has ended its program"
    if wait.world in answer.broken:
        return f"has failed in {wait.world}{_at(answer.call_site)}"
    if answer.waits:
        longest = max(answer.waits, key=lambda theirs: (theirs.world == wait.world, theirs.seconds))
        return f"waits in {describe(longest)}{_at(answer.call_site)}"
    return f"computes{_at(answer.call_site)}"


def _at(call_site: str) -> str:
    return f", at {call_site}" if call_site else ""


def call_site() -> str:
    """Return FILE:LINE of the main thread in the user's program; of a library if no frame is in the program; "" where
    no temporary file can be made.

    `faulthandler` reads all frames in one call. Frame objects of a thread that runs are not safe to follow (Python
    3.11): a garbage collection on the way may let that thread go on, and `f_back` is then whatever has taken the
    frame's place.
    """
    threads: list[str] = []
    with suppress(OSError), tempfile.TemporaryFile() as dump:
        faulthandler.dump_traceback(dump)
        dump.seek(0)
        threads = dump.read().decode("ascii", "replace").split("\n\n")
    identity = f"0x{threading.main_thread().ident:016x}"
    main = next((thread for thread in threads if identity in thread.partition("\n")[0]), "")
    frames = re.findall(r'^  File "(.*)", line (\d+) in', main, re.MULTILINE)  # the innermost first
    of_program = [frame for frame in frames if is_of_program(frame[0])]
    return next((":".join(frame) for frame in [*of_program, *frames]), "")


CALLS_KEPT = 256


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
    """The calls of a world on this rank: the current call, recent calls, and the error that ended the world.

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
        self.descriptions = [""] * CALLS_KEPT
        """Descriptions of recent calls: of call n at index n % CALLS_KEPT."""

    @contextmanager
    def enter(self, description: str, in_library: bool = False) -> Iterator[None]:
        """Enter a call, or a part of one."""
        outer = self.begin(description, in_library)
        try:
            yield
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
            self.descriptions[call_number % CALLS_KEPT] = description
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
        return self.descriptions[call_number % CALLS_KEPT] if is_kept else ""

    @property
    def position(self) -> int:
        """Number of calls and barriers that this rank has entered: equal on ranks at the same point of the program."""
        signals = self.signals
        return self.number + (0 if signals is None else signals.sequence)

    @property
    def current(self) -> Wait | None:
        """The call that this rank is in, if it may wait there; else None."""
        position, signals = self.position, self.signals
        if self.busy:
            return Wait(self.name, position, self.description(self.number), self.progress.seconds)
        waiting = None if signals is None else signals.waiting
        return None if waiting is None else Wait(self.name, position, waiting.description, self.progress.seconds)
