"""Event logs: written line by line, read to where they were cut off, cut back where a run resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.asynchronous.event_log import EventLog, log_path, logged_servers, read_events, read_order, truncate_events
from unisono.errors import CheckpointError


def written(run: Path, workers: list[int]) -> None:
    log = EventLog(run, 0)
    for exchange, worker in enumerate(workers):
        log.add(number=exchange, worker=worker, sent=exchange, applied=exchange, stale=0)
    log.add(died=workers[-1], number=len(workers))
    log.close()


def test_the_order_is_read_as_it_was_written(tmp_path: Path) -> None:
    written(tmp_path, [2, 0, 0, 1])
    assert read_order(tmp_path, 0) == [2, 0, 0, 1]
    assert read_order(tmp_path, 0, 3) == [2, 0, 0]
    assert read_events(tmp_path, 0)[-1] == {"died": 1, "number": 4}


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    written(tmp_path, [2, 0, 1])
    path = log_path(tmp_path, 0)
    text = path.read_text()
    path.write_text(text[: text.index('"worker": 1') + 5])
    assert read_order(tmp_path, 0) == [2, 0]


def test_lines_are_there_before_the_log_is_closed(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 1)
    log.add(number=0, worker=3)
    assert read_order(tmp_path, 1) == [3]
    log.close()


def test_a_resumed_run_continues_the_log(tmp_path: Path) -> None:
    written(tmp_path, [2, 0, 0, 1])
    truncate_events(tmp_path, 0, 2)
    log = EventLog(tmp_path, 0)
    log.add(number=2, worker=7)
    log.close()
    assert read_order(tmp_path, 0) == [2, 0, 7]
    assert all("died" not in event for event in read_events(tmp_path, 0))


def test_a_log_without_events_is_removed(tmp_path: Path) -> None:
    written(tmp_path, [2, 0])
    truncate_events(tmp_path, 0, 0)
    assert logged_servers(tmp_path) == []


def test_the_reason_why_a_replay_would_differ_is_kept(tmp_path: Path) -> None:
    written(tmp_path, [2, 0])
    truncate_events(tmp_path, 0, 1, "it was resumed on a Monday")
    assert read_events(tmp_path, 0)[-1] == {"inexact": "it was resumed on a Monday", "number": 1}


def test_the_reason_stays_where_a_run_resumes_twice_at_one_place(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    for exchange in range(3):
        log.add(number=exchange, worker=0)
    log.close()
    truncate_events(tmp_path, 0, 2, "it has lost a snapshot")
    truncate_events(tmp_path, 0, 2)
    assert read_events(tmp_path, 0)[-1] == {"inexact": "it has lost a snapshot", "number": 2}
    truncate_events(tmp_path, 0, 1)  # what was lost is trained again
    assert [event["number"] for event in read_events(tmp_path, 0)] == [0]


def test_a_run_without_events_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no events of server 0: No such file or directory"):
        read_events(tmp_path, 0)
    truncate_events(tmp_path, 0, 0)
    assert not log_path(tmp_path, 0).exists()
