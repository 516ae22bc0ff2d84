"""What is said of ranks that wait, and of those that they wait for: for any number of ranks, in one process."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.collectives import states
from unisono.collectives.states import (
    DEAD,
    MAX_LISTED_RANKS,
    SILENT,
    STOPPED,
    Answer,
    State,
    Wait,
    call_site,
    failure,
    is_hopeless,
    is_reporter,
    missing_ranks,
    report,
)
from unisono.uncaught import is_of_program

WAIT = Wait("world", 7, "allreduce(5 x float32)", 10.0)


def state(calls: int, *waits: Wait, world: str = "world", ended: bool = False) -> State:
    return State("train.py:12", waits, {world: calls}, (), ended)


def reported(answer: Answer) -> str:
    return report(0, 2, WAIT, "train.py:3", [1], {1: answer}).partition("; missing: rank 1, which ")[2]


def test_report_names_call_site_of_a_computing_rank() -> None:
    assert report(0, 2, WAIT, "train.py:3", [1], {1: state(6)}) == (
        "rank 0 of 2 has waited 10 s in allreduce(5 x float32), call 7 of world, at train.py:3; "
        "missing: rank 1, which computes, at train.py:12"
    )


def test_report_describes_activity_of_a_missing_rank() -> None:
    assert reported(state(6, Wait("dup", 3, "barrier()", 4.0))) == "waits in barrier(), call 3 of dup, at train.py:12"
    assert reported(state(6, ended=True)) == "has ended its program"
    assert reported(STOPPED).startswith("is stopped (by SIGSTOP")
    assert reported(SILENT) == "does not respond"
    assert reported(DEAD) == "is dead"
    assert reported(State("train.py:9", broken={"world": ""})) == "has failed in world, at train.py:9"


def test_wait_in_the_same_world_is_reported_first() -> None:
    waits = Wait("dup", 9, "barrier()", 40.0), Wait("world", 6, "all_gather_object()", 1.0)
    assert reported(state(6, *waits)).startswith("waits in all_gather_object(), call 6 of world")


def test_ended_ranks_are_hopeless() -> None:
    assert is_hopeless(WAIT, state(6, ended=True))
    assert is_hopeless(WAIT, State("", broken={"world": ""}))
    assert is_hopeless(WAIT, DEAD)
    hopeful = STOPPED, SILENT, state(6), State("", broken={"dup": ""}), State("", ended=True)
    assert not any(is_hopeless(WAIT, answer) for answer in hopeful)


def test_error_names_the_remedy() -> None:
    assert "UNISONO_TIMEOUT" in failure("rank 0 of 2 has waited", False, None)
    assert "as many calls" in failure("rank 0 of 2 has waited", True, 0.5)
    assert failure("rank 0 of 2 has waited", False, 0.5) == "Timed out after 0.5 s: rank 0 of 2 has waited"


def test_rank_blocked_within_the_call_is_missing() -> None:
    answers = {1: state(7, WAIT), 2: state(7)}
    assert missing_ranks(WAIT, [1, 2], answers) == [2]
    assert missing_ranks(WAIT, [1], {1: state(7, WAIT)}) == []
    assert "all ranks have entered it" in report(0, 2, WAIT, "", [], {})


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), min_size=1, max_size=600))
def test_missing_ranks_are_those_not_in_the_call(ranks: list[tuple[int, bool, bool]]) -> None:
    answers: dict[int, Answer] = {
        rank: SILENT if silent else state(calls, WAIT, ended=ended)
        for rank, (calls, silent, ended) in enumerate(ranks, 1)
    }
    late = [rank for rank, (calls, silent, _) in enumerate(ranks, 1) if calls < 7 or silent]
    late = late or [rank for rank, (_, _, ended) in enumerate(ranks, 1) if ended]
    assert missing_ranks(WAIT, list(answers), answers) == late
    text = report(0, len(ranks) + 1, WAIT, "", late, answers)
    assert all(f"rank {rank}, which" in text for rank in late[:MAX_LISTED_RANKS])
    assert (f"and {len(late) - MAX_LISTED_RANKS} more" in text) == (len(late) > MAX_LISTED_RANKS)


@given(st.sets(st.integers(0, 500), min_size=1))
def test_one_rank_reports_for_all_waiting_ranks(waiting: set[int]) -> None:
    answers: dict[int, Answer] = {rank: state(7, WAIT) for rank in waiting}
    assert [rank for rank in waiting if is_reporter(rank, WAIT, answers)] == [min(waiting)]


def test_late_rank_does_not_report_for_waiting_ranks() -> None:
    assert is_reporter(1, WAIT, {0: state(7, WAIT._replace(seconds=1.0))})
    assert is_reporter(1, WAIT, {0: state(7, WAIT._replace(number=6))})


def test_call_site_is_this_line() -> None:
    sites: list[str] = []
    thread = threading.Thread(target=lambda: sites.append(call_site()))
    thread.start()
    thread.join()
    assert sites[0].rpartition(":")[0] == __file__


def test_no_call_site_without_a_temporary_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    assert call_site() == ""


def test_library_files_are_not_user_code() -> None:
    assert not any(is_of_program(file) for file in (torch.__file__, threading.__file__, states.__file__))
    assert not is_of_program("<frozen runpy>")
    assert is_of_program("<string>")
