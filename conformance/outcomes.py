"""What came of a test: on one rank, and on all of them together."""

from __future__ import annotations

import time
import traceback
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

PASSED, SKIPPED, FAILED, HUNG, CRASHED = "passed", "skipped", "failed", "hung", "crashed"
STATES = (PASSED, SKIPPED, FAILED, HUNG, CRASHED)


class Outcome(NamedTuple):
    """A state, its reason in one line (of a skip or an error), all that is known about it, and how long it took."""

    state: str
    reason: str = ""
    details: str = ""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether the same processes may go on with the next test."""
        return self.state in {PASSED, SKIPPED}


def attempt(action: Callable[[], object], reasons: Mapping[int, str]) -> Outcome:
    """Whatever an action does, raises or exits with, as an outcome; `reasons` are those of exit codes that skip."""
    start = time.monotonic()
    try:
        action()
    except unittest.SkipTest as skip:
        outcome = Outcome(SKIPPED, str(skip))
    except SystemExit as leave:
        skipped = leave.code in reasons
        outcome = Outcome(SKIPPED, reasons[leave.code]) if skipped else failure(leave)
    except BaseException as error:  # noqa: BLE001 - also what is no Exception ends a test, not the others after it
        outcome = failure(error)
    else:
        outcome = Outcome(PASSED)
    return outcome._replace(seconds=round(time.monotonic() - start, 2))


def failure(error: BaseException) -> Outcome:
    """An error as an outcome: its first line as the reason, its traceback as the details."""
    lines = str(error).strip().splitlines() or [""]
    return Outcome(FAILED, f"{type(error).__name__}: {lines[0]}", "".join(traceback.format_exception(error)))


def combine(outcomes: Sequence[Outcome]) -> Outcome:
    """What all ranks together say: the worst state of any, with the reason of the rank that was first in it.

    As in PyTorch's own runs a test is skipped by all ranks or by none.
    """
    states = {outcome.state for outcome in outcomes}
    slowest = max(outcome.seconds for outcome in outcomes)
    if states == {PASSED, SKIPPED}:
        return Outcome(FAILED, "some ranks passed and others skipped", "", slowest)
    worst = max(states, key=STATES.index)
    those = [rank for rank, outcome in enumerate(outcomes) if outcome.state == worst]
    first = min(those, key=lambda rank: outcomes[rank].seconds)  # what came later may follow from it
    details = "\n".join(f"--- rank {rank}\n{outcomes[rank].details}" for rank in those if outcomes[rank].details)
    return Outcome(worst, outcomes[first].reason, details, slowest)
