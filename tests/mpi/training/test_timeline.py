"""The file of a run has every lane of every rank."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.training.trace_format import check_trace, nanoseconds

from unisono.training.recipe import Recipe, parse_recipe
from unisono.training.run import TrainOptions, train
from unisono.training.timeline import PREDICTED, lane_order
from unisono.world import World

Event = dict[str, Any]

ALONE = {
    *("main", "update 0", "loading", "decoding 0", "test decoding 0", "shuffle", "evaluation", "checkpoint"),
}
TOGETHER = ALONE | {
    *("communication 0", "predicted main", "predicted communication", "predicted update"),
}


def lanes_of(document: dict[str, Any], rank: int) -> dict[str, list[Event]]:
    """The spans of a rank by lane, in the order in which the lanes are shown."""
    mine = [event for event in document["traceEvents"] if event["pid"] == rank]
    names = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in mine if event["name"] == "thread_sort_index"}
    spans = defaultdict[str, list[Event]](list)
    for tid in sorted(names, key=order.__getitem__):
        spans[names[tid]] = [event for event in mine if event["ph"] == "X" and event["tid"] == tid]
    return spans


def in_order(spans: list[Event]) -> list[Event]:
    return sorted(spans, key=lambda span: span["ts"])


def traced(group: World, content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The trace of a run, checked against the format."""
    home = group.call_on_root(lambda: folder)
    train(parse_recipe(Recipe, content, "a test"), group, TrainOptions(home / "run", trace=home / "trace.json"))
    group.barrier()
    document: dict[str, Any] = json.loads((home / "trace.json").read_text())
    check_trace(document)
    assert {event["pid"] for event in document["traceEvents"]} == set(range(group.size))
    return document


def test_a_run_on_a_pack_has_every_lane_and_its_prediction(group: World, packs: Path, tmp_path: Path) -> None:
    content = {
        "data": {"pack": str(packs), "augment": "mirror", "threads": 1},
        "model": {"name": "small_convnet"},
        "rule": {"overlap": "chain"},
        "training": {"epochs": 3, "batch": 8, "checkpoint_every": 5},
    }
    document = traced(group, content, tmp_path)
    for rank in range(group.size):
        lanes = lanes_of(document, rank)
        assert (ALONE if group.size == 1 else TOGETHER) <= set(lanes)
        assert list(lanes) == sorted(lanes, key=lane_order)
        for name, spans in lanes.items():
            assert spans, name
            if name != "main":  # whose backward pass has what the main thread itself exchanges meanwhile
                times = [(nanoseconds(span["ts"]), nanoseconds(span["dur"])) for span in in_order(spans)]
                assert all(begin + lasts <= after for (begin, lasts), (after, _) in pairwise(times)), name
        names = [span["name"] for span in in_order(lanes["main"])]
        assert names[:3] == ["wait for data", "forward", "backward"]
        assert names.count("forward") == 3 * 13
        assert [span["name"] for span in in_order(lanes["checkpoint"])][:2] == [
            "gather",
            "write" if rank == 0 else "wait for rank 0",
        ]
        assert len(lanes["checkpoint"]) == 2 * (3 + 39 // 5)
        assert [len(lanes[name]) for name in ("shuffle", "evaluation")] == [3, 3]
        if group.size > 1:
            check_predicted(lanes)


def check_predicted(lanes: dict[str, list[Event]]) -> None:
    """From some step on, each has a prediction, which begins after its batch has come and before its forward pass."""
    steps = [span for span in in_order(lanes["main"]) if span["name"] in ("wait for data", "forward")]
    pairs = [pair for pair in pairwise(steps) if [event["name"] for event in pair] == ["wait for data", "forward"]]
    predicted = [span for name, spans in lanes.items() if name.startswith(PREDICTED) for span in spans]
    reads = [span["ts"] for span in predicted if span["name"] == "forward"]
    begins = [[ts for ts in reads if wait["ts"] + wait["dur"] <= ts <= forward["ts"]] for wait, forward in pairs]
    assert begins[-1], "the search ends within the run"
    first = next(place for place, predictions in enumerate(begins) if predictions)
    assert all(begins[first:])
    assert min(span["ts"] for span in predicted) == min(begins[first])
    assert {span["cat"] for span in predicted} == {"predicted"}
    for lane in ("main", "communication", "update"):
        names = [span["name"] for name, spans in lanes.items() if name.startswith(PREDICTED + lane) for span in spans]
        assert min(map(names.count, names)) >= len(begins) - first, lane


@pytest.mark.parametrize("server", ["rank", "thread"])
def test_workers_and_servers_have_lanes(group: World, tmp_path: Path, server: str) -> None:
    if server == "rank" and group.size == 1:
        return
    content = {
        "rule": {"name": "easgd", "server": server},
        "training": {"epochs": 1, "batch": 72, "checkpoint_every": 10},
    }
    document = traced(group, content, tmp_path)
    workers = group.size - (server == "rank")
    for rank in range(group.size):
        lanes = lanes_of(document, rank)
        assert ("server 0" in lanes) == (rank == (0 if server == "thread" else group.size - 1))
        if rank >= workers:
            assert set(lanes) == {"server 0"}
            continue
        assert {"main", "communication 0", "update 0", "loading"} <= set(lanes)
        names = {span["name"] for span in lanes["main"]}
        assert {"wait for data", "forward", "backward", "wait for replies"} <= names
        assert not [name for name in lanes if name.startswith(PREDICTED)], "workers are out of step: none is predicted"
    stored = [lane for rank in range(workers) for lane in lanes_of(document, rank)]
    assert {"evaluation", "checkpoint"} <= set(stored)
