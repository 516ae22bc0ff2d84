from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.training.timeline.trace_format import check_trace

from unisono.errors import UsageError
from unisono.plan.choose import PredictionInputs, predicted
from unisono.rules import BSP
from unisono.step.costs import Computing, Cost
from unisono.step.layout import Bucket
from unisono.training.timeline import Timeline, check_writable
from unisono.training.timeline import collect as collecting
from unisono.world import World

COMPUTING = Computing((0.0, 0.125), (0.75, 0.5), 0.75)
BUCKETS = [Bucket(1, (1,)), Bucket(1, (0,))]


class OneRank:
    """World of this process alone."""

    def barrier(self) -> None:
        """Return at once."""

    def all_gather_object(self, mine: Any) -> list[Any]:
        return [mine]

    def call_on_root(self, function: Callable[[], Any]) -> Any:
        return function()


def test_measured_and_predicted_spans_of_a_step_are_on_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting.time, "perf_counter", lambda: 100.0)
    timeline = Timeline(cast("World", OneRank()))
    inputs = PredictionInputs(BSP(), COMPUTING, lambda *_: BUCKETS, Cost(0.125, 0.0))
    chosen = predicted(inputs, 1, "chain", 2)
    for begin in (101.0, 103.0):
        timeline.begin_step(begin, chosen)
    with timeline.span("wait for data", "waiting"):
        pass
    timeline.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    check_trace(document)
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [(one["name"], one["ts"], one["dur"]) for one in spans if one["cat"] == "waiting"] == [
        ("wait for data", 0.0, 0.0)
    ]
    forward = [one for one in spans if one["name"] == "forward"]
    assert {one["cat"] for one in forward} == {"predicted"}
    assert forward[0]["ts"] >= 1e6
    assert sum(one["dur"] for one in forward) == 2 * 0.125 * 1e6
    assert len([one for one in spans if one["name"] == "allreduce 1"]) == 2


def test_a_file_that_cannot_be_written_is_known_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "trace.json")
    with pytest.raises(UsageError, match=r"cannot write the timeline .*missing/trace.json: No such file"):
        check_writable(tmp_path / "missing" / "trace.json")
