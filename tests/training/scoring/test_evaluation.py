from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from unisono.training.accuracy import Accuracy
from unisono.training.scoring.evaluation import Evaluation, finite
from unisono.training.scoring.throughput import BatchThroughput


class Bare(Evaluation):
    """An evaluation with a measure of its own."""

    def own_data(self) -> dict[str, Any]:
        return {"own": 1}

    def rows(self) -> Iterator[tuple[str, str]]:
        yield "own", "1"


FOUND = Bare(samples=8, accuracy=Accuracy(0.625, None, 0.61234))


def test_data_has_what_all_evaluations_have_around_their_own() -> None:
    data = FOUND.as_data()
    assert data == {"samples": 8, "loss": 0.61234, "top1": 0.625, "top5": None, "own": 1, "throughput": []}
    assert list(data) == ["samples", "loss", "top1", "top5", "own", "throughput"]
    assert FOUND.images("title") == {}


def test_a_loss_that_is_not_finite_is_still_json() -> None:
    diverged = replace(FOUND, accuracy=replace(FOUND.accuracy, loss=float("nan")))
    assert json.loads(json.dumps(diverged.as_data(), allow_nan=False))["loss"] is None


@pytest.mark.parametrize(("value", "expected"), [(1.5, 1.5), (float("inf"), None), (float("nan"), None)])
def test_numbers_that_json_does_not_have_are_none(value: float, expected: float | None) -> None:
    assert finite(value) == expected


def test_throughput_is_by_batch_size() -> None:
    timed = replace(FOUND, throughput=(BatchThroughput(2, 0.5, 4.0, 3),))
    assert timed.as_data()["throughput"] == [{"batch": 2, "seconds": 0.5, "samples_per_second": 4.0, "passes": 3}]
    assert (timed.speed(timed.throughput[0]), timed.speed_unit) == (4.0, "samples/s")
