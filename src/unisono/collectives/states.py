"""States that ranks report when one waits for long, and the messages made from them.

rank 0   waits 10 s in call 7 of world   ── query ──▶  all ranks
rank 1   State: world is at call 6, waits in call 3 of "dup 1 of world", at train.py:12
rank 2   no answer; its process is stopped

"rank 0 of 3 has waited 10 s in allreduce(5 x float32), call 7 of world, at train.py:11; missing: rank 1, which waits
 in barrier(), call 3 of dup 1 of world, at train.py:12; rank 2, which is stopped ..."

All are pure functions, but `call_site`: the line at which the main thread is in the user's program, outside of unisono,
PyTorch and Python.
"""

from __future__ import annotations

import faulthandler
import json
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

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


def encode(state: State) -> bytes:
    """Return a state as JSON, for other processes."""
    return json.dumps(state).encode()


def decode(content: bytes) -> State:
    call_site, waits, numbers, broken, ended = json.loads(content)
    return State(call_site, tuple(Wait(*wait) for wait in waits), numbers, broken, ended)


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
    waiting = [
        peer
        for peer, answer in answers.items()
        if peer < rank and isinstance(answer, State)
        for theirs in answer.waits
        if theirs[:2] == wait[:2] and theirs.seconds > wait.seconds / 2
    ]
    return not waiting


def report(
    rank: int, size: int, wait: Wait, call_site: str, missing: Sequence[int], answers: Mapping[int, Answer]
) -> str:
    waited = f"rank {rank} of {size} has waited {wait.seconds:.0f} s in {describe(wait)}{_at(call_site)}"
    return f"{waited}; {_describe_missing(wait, missing, answers)}"


def failure(report: str, hopeless: bool, timeout: float | None) -> str:
    """Return the error message of a rank whose wait is ended; `timeout` is that of its world, None for the job's."""
    if timeout is not None and not hopeless:
        return f"Timed out after {timeout:g} s: {report}"
    return f"{report}: {ENDED_REMEDY if hopeless else TIMEOUT_REMEDY}"


def describe(wait: Wait) -> str:
    return f"{wait.description}, call {wait.number} of {wait.world}"


def _describe_missing(wait: Wait, missing: Sequence[int], answers: Mapping[int, Answer]) -> str:
    if not missing:
        return "all ranks have entered it, and wait"
    each = [
        f"rank {rank}, which {_describe_activity(wait, answers.get(rank, SILENT))}"
        for rank in missing[:MAX_LISTED_RANKS]
    ]
    more = [f"and {len(missing) - MAX_LISTED_RANKS} more"] if len(missing) > MAX_LISTED_RANKS else []
    return "missing: " + "; ".join([*each, *more])


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
    """Return FILE:LINE of the main thread in the user's program; of a library if no frame is in the program."""
    frames = _main_thread_frames()
    of_program = [frame for frame in frames if is_of_program(frame[0])]
    return next((":".join(frame) for frame in [*of_program, *frames]), "")


def is_exiting() -> bool:
    """Return True if the program has ended, and what `atexit` calls may still run."""
    return not threading.main_thread().is_alive()


def _main_thread_frames() -> list[tuple[str, str]]:
    """Return files and lines of the main thread's frames, the innermost first.

    `faulthandler` reads them in one call. Frame objects of a thread that runs are not safe to follow (Python 3.11): a
    garbage collection on the way may let that thread go on, and `f_back` is then whatever has taken the frame's place.
    Returns none where no temporary file can be made.
    """
    threads: list[str] = []
    with suppress(OSError), tempfile.TemporaryFile() as dump:
        faulthandler.dump_traceback(dump)
        dump.seek(0)
        threads = dump.read().decode("ascii", "replace").split("\n\n")
    identity = f"0x{threading.main_thread().ident:016x}"
    main = next((thread for thread in threads if identity in thread.partition("\n")[0]), "")
    return re.findall(r'^  File "(.*)", line (\d+) in', main, re.MULTILINE)
