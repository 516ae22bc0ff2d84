"""What came of a test: on one rank, and on all of them together."""

from __future__ import annotations

import sys
import unittest

import pytest

from outcomes import CRASHED, FAILED, HUNG, PASSED, SKIPPED, Outcome, attempt, combine

REASONS = {73: "too few ranks"}


def test_what_goes_well_has_passed() -> None:
    outcome = attempt(lambda: None, REASONS)
    assert outcome.state == PASSED
    assert outcome.clean


def test_a_skip_has_its_reason_from_the_exception_or_the_exit_code() -> None:
    def skip() -> None:
        raise unittest.SkipTest("no GPU")

    assert attempt(skip, REASONS)[:2] == (SKIPPED, "no GPU")
    assert attempt(lambda: sys.exit(73), REASONS)[:2] == (SKIPPED, "too few ranks")


def test_any_other_end_has_failed_with_its_first_line_and_its_traceback() -> None:
    def fail() -> None:
        raise ValueError("first\nsecond")

    outcome = attempt(fail, REASONS)
    assert outcome[:2] == (FAILED, "ValueError: first")
    assert "second" in outcome.details
    assert "Traceback" in outcome.details
    assert attempt(lambda: sys.exit(3), REASONS)[:2] == (FAILED, "SystemExit: 3")


@pytest.mark.parametrize("worse", [FAILED, HUNG, CRASHED])
def test_the_worst_of_the_ranks_counts(worse: str) -> None:
    ranks = [Outcome(PASSED, seconds=3.0), Outcome(worse, "why", "all of it", 1.0), Outcome(PASSED)]
    assert combine(ranks) == Outcome(worse, "why", "--- rank 1\nall of it", 3.0)


def test_the_rank_that_failed_first_gives_the_reason() -> None:
    ranks = [Outcome(FAILED, "nobody came", seconds=9.0), Outcome(FAILED, "the cause", seconds=1.0)]
    assert combine(ranks).reason == "the cause"


def test_a_test_is_skipped_by_all_or_none() -> None:
    skipped = Outcome(SKIPPED, "no GPU")
    assert combine([skipped, skipped]) == skipped
    assert combine([skipped, Outcome(PASSED)]).state == FAILED
