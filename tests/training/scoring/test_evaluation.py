from __future__ import annotations

import json
import sys
from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch

from unisono.training.accuracy import Accuracy
from unisono.training.measures import finite
from unisono.training.scoring.evaluation import (
    BATCH_SIZES,
    CONFUSION,
    MAX_MATRIX,
    MAX_PASSES,
    MIN_PASSES,
    BatchThroughput,
    Evaluation,
    measure_throughput,
)

OF_TOKENS = Evaluation(samples=500, accuracy=Accuracy(0.625, 0.875, 2 * log(2)), tokens_per_sample=4, bytes_per_token=1)
"""The worked example: two bits a token."""


def test_the_table_has_loss_perplexity_and_bits() -> None:
    assert list(OF_TOKENS.rows()) == [
        ("samples", "500"),
        ("tokens", "2,000"),
        ("loss per token", "1.3863"),
        ("perplexity", "4.00"),
        ("bits per byte", "2.0000"),
        ("token accuracy", "62.50%"),
        ("token accuracy, top-5", "87.50%"),
    ]


def test_tokens_of_several_bytes_have_no_bits_per_byte() -> None:
    score = replace(OF_TOKENS, bytes_per_token=None, accuracy=Accuracy(0.5, None, 1.0))
    assert [name for name, _ in score.rows()] == ["samples", "tokens", "loss per token", "perplexity", "token accuracy"]
    assert score.as_data()["bits_per_byte"] is None


def test_data_has_tokens_and_no_confusion() -> None:
    data = json.loads(json.dumps(OF_TOKENS.as_data(), allow_nan=False))
    assert (data["tokens"], data["perplexity"], data["bits_per_byte"]) == (2000, pytest.approx(4), pytest.approx(2))
    assert "confusion" not in data
    assert OF_TOKENS.images("title") == {}
    assert OF_TOKENS.remark


def test_bits_are_divided_among_the_bytes_of_a_token() -> None:
    assert replace(OF_TOKENS, bytes_per_token=2, accuracy=Accuracy(0.5, None, log(2))).bits_per_byte == 0.5


@pytest.mark.parametrize(("value", "expected"), [(1.5, 1.5), (float("inf"), None), (float("nan"), None), (None, None)])
def test_numbers_that_json_does_not_have_are_none(value: float | None, expected: float | None) -> None:
    assert finite(value) == expected


def test_a_diverged_network_is_still_json() -> None:
    diverged = replace(OF_TOKENS, accuracy=Accuracy(0.0, None, float("nan")))
    data = json.loads(json.dumps(diverged.as_data(), allow_nan=False))
    assert (data["loss"], data["perplexity"], data["bits_per_byte"]) == (None, None, None)


def test_throughput_is_in_tokens() -> None:
    entry = BatchThroughput(2, 0.5, 4.0, 3)
    assert (OF_TOKENS.speed(entry), OF_TOKENS.speed_unit) == (16.0, "tokens/s")
    assert replace(OF_TOKENS, throughput=(entry,)).as_data()["throughput"] == [
        {"batch": 2, "seconds": 0.5, "samples_per_second": 4.0, "passes": 3, "tokens_per_second": 16.0}
    ]


OF_CLASSES = Evaluation(
    samples=8,
    accuracy=Accuracy(0.625, None, 0.61234),
    classes=("cat", "dog", "owl"),
    confusion=np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]]),
)


def test_data_has_each_class_and_the_confusion() -> None:
    data = json.loads(json.dumps(OF_CLASSES.as_data(), allow_nan=False))
    assert (data["samples"], data["loss"], data["top1"], data["top5"]) == (8, 0.61234, 0.625, None)
    assert data["classes"] == [
        {"class": "cat", "samples": 4, "recall": 0.75, "precision": 0.6},
        {"class": "dog", "samples": 4, "recall": 0.5, "precision": pytest.approx(2 / 3)},
        {"class": "owl", "samples": 0, "recall": None, "precision": None},
    ]
    assert data["confusion"] == [[3, 1, 0], [2, 2, 0], [0, 0, 0]]
    assert list(data) == ["samples", "loss", "top1", "top5", "classes", "confusion", "throughput"]


def test_of_many_classes_data_have_the_cells_that_are_not_0() -> None:
    confusion = np.diag(np.full(MAX_MATRIX + 1, 2))
    confusion[3, 7] = 1
    many = replace(OF_CLASSES, classes=tuple(map(str, range(len(confusion)))), confusion=confusion)
    data = json.loads(json.dumps(many.as_data()))
    assert "confusion" not in data
    assert data["confusion_cells"][2:6] == [[2, 2, 2], [3, 3, 2], [3, 7, 1], [4, 4, 2]]
    assert ("mistake", "3 as 7: 1") in list(many.rows())


def test_throughput_is_by_batch_size() -> None:
    timed = replace(OF_CLASSES, throughput=(BatchThroughput(2, 0.5, 4.0, 3),))
    assert timed.as_data()["throughput"] == [{"batch": 2, "seconds": 0.5, "samples_per_second": 4.0, "passes": 3}]
    assert (timed.speed(timed.throughput[0]), timed.speed_unit) == (4.0, "samples/s")


def test_the_table_names_the_weakest_class_and_the_mistakes() -> None:
    assert list(OF_CLASSES.rows()) == [
        ("samples", "8"),
        ("loss", "0.6123"),
        ("top-1 accuracy", "62.50%"),
        ("lowest recall", "dog: 50.00%"),
        ("mistake", "dog as cat: 2"),
        ("mistake", "cat as dog: 1"),
    ]
    six = Evaluation(
        samples=6, accuracy=Accuracy(1.0, 1.0, 0.1), classes=tuple("abcdef"), confusion=np.eye(6, dtype=np.int64)
    )
    assert list(six.rows())[3:] == [("top-5 accuracy", "100.00%"), ("lowest recall", "a: 100.00%")]


def test_the_picture_has_the_run_and_its_accuracy_in_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert b"pets, step 7: top-1 62.50%" in OF_CLASSES.images("pets, step 7")[CONFUSION]
    assert not OF_CLASSES.remark
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert OF_CLASSES.images("pets, step 7") == {}
    assert OF_CLASSES.remark.startswith("no pictures, as matplotlib is not installed: pip install")


class Passes:
    """Forward passes that take `seconds` of their own clock each, the first of a size ten times as long."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.now, self.sizes = seconds, 0.0, list[int]()

    def forward(self, inputs: torch.Tensor) -> None:
        first = len(inputs) not in self.sizes
        self.now += 10.0 if first else self.seconds[self.sizes.count(len(inputs)) % len(self.seconds)]
        self.sizes.append(len(inputs))

    def measure(self, *sizes: int) -> list[tuple[int, float, float, int]]:
        return list(measure_throughput(self.forward, lambda samples: torch.zeros(samples, 1), sizes, lambda: self.now))


def test_the_median_counts_and_the_first_pass_does_not() -> None:
    passes = Passes(2.0, 1.0, 4.0)
    assert passes.measure(1, 8) == [(1, 2.0, 0.5, MIN_PASSES), (8, 2.0, 4.0, MIN_PASSES)]
    assert passes.sizes == [1] * (1 + MIN_PASSES) + [8] * (1 + MIN_PASSES)


def test_short_passes_are_repeated_until_their_time_or_number_is_enough() -> None:
    assert [entry[3] for entry in Passes(0.125).measure(1)] == [4]
    assert [entry[3] for entry in Passes(1e-6).measure(1)] == [MAX_PASSES]


def test_batch_sizes_double_from_1_to_256() -> None:
    assert tuple(2**power for power in range(9)) == BATCH_SIZES
