from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from unisono.training.accuracy import Accuracy
from unisono.training.scoring.evaluation import Evaluation, as_data, rows
from unisono.training.scoring.throughput import BatchThroughput

FOUND = Evaluation(("cat", "dog", "owl"), np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]]), Accuracy(0.625, None, 0.61234))


def test_data_has_each_class_and_the_confusion() -> None:
    data = json.loads(json.dumps(as_data(FOUND), allow_nan=False))
    assert (data["samples"], data["loss"], data["top1"], data["top5"]) == (8, 0.61234, 0.625, None)
    assert data["classes"] == [
        {"class": "cat", "samples": 4, "recall": 0.75, "precision": 0.6},
        {"class": "dog", "samples": 4, "recall": 0.5, "precision": pytest.approx(2 / 3)},
        {"class": "owl", "samples": 0, "recall": None, "precision": None},
    ]
    assert data["confusion"] == [[3, 1, 0], [2, 2, 0], [0, 0, 0]]
    assert data["throughput"] == []


def test_a_loss_that_is_not_finite_is_still_json() -> None:
    diverged = Evaluation(FOUND.classes, FOUND.confusion, replace(FOUND.accuracy, loss=float("nan")))
    assert json.loads(json.dumps(as_data(diverged), allow_nan=False))["loss"] is None


def test_throughput_is_by_batch_size() -> None:
    timed = Evaluation(FOUND.classes, FOUND.confusion, FOUND.accuracy, (BatchThroughput(2, 0.5, 4.0, 3),))
    assert as_data(timed)["throughput"] == [{"batch": 2, "seconds": 0.5, "samples_per_second": 4.0, "passes": 3}]


def test_the_table_names_the_weakest_class_and_the_mistakes() -> None:
    assert list(rows(FOUND)) == [
        ("samples", "8"),
        ("loss", "0.6123"),
        ("top-1 accuracy", "62.50%"),
        ("lowest recall", "dog: 50.00%"),
        ("mistake", "dog as cat: 2"),
        ("mistake", "cat as dog: 1"),
    ]
    six = Evaluation(tuple("abcdef"), np.eye(6, dtype=np.int64), Accuracy(1.0, 1.0, 0.1))
    assert list(rows(six))[3:] == [("top-5 accuracy", "100.00%"), ("lowest recall", "a: 100.00%")]
