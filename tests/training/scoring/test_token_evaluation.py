from __future__ import annotations

import json
from dataclasses import replace
from math import log

import pytest

from unisono.training.accuracy import Accuracy
from unisono.training.scoring.throughput import BatchThroughput
from unisono.training.scoring.token_evaluation import TokenEvaluation, bits_per_byte

FOUND = TokenEvaluation(
    samples=500, accuracy=Accuracy(0.625, 0.875, 2 * log(2)), tokens_per_sample=4, bytes_per_token=1
)
"""The worked example: two bits a token."""


def test_the_table_has_loss_perplexity_and_bits() -> None:
    assert list(FOUND.rows()) == [
        ("samples", "500"),
        ("tokens", "2,000"),
        ("loss per token", "1.3863"),
        ("perplexity", "4.00"),
        ("bits per byte", "2.0000"),
        ("token accuracy", "62.50%"),
        ("token accuracy, top-5", "87.50%"),
    ]


def test_tokens_of_several_bytes_have_no_bits_per_byte() -> None:
    words = replace(FOUND, bytes_per_token=None, accuracy=Accuracy(0.5, None, 1.0))
    assert [name for name, _ in words.rows()] == ["samples", "tokens", "loss per token", "perplexity", "token accuracy"]
    assert words.as_data()["bits_per_byte"] is None


def test_data_has_tokens_and_no_confusion() -> None:
    data = json.loads(json.dumps(FOUND.as_data(), allow_nan=False))
    assert (data["tokens"], data["perplexity"], data["bits_per_byte"]) == (2000, pytest.approx(4), pytest.approx(2))
    assert "confusion" not in data
    assert FOUND.images("title") == {}
    assert FOUND.remark


def test_bits_are_divided_among_the_bytes_of_a_token() -> None:
    assert bits_per_byte(log(2), 2) == 0.5


def test_a_diverged_network_is_still_json() -> None:
    diverged = replace(FOUND, accuracy=Accuracy(0.0, None, float("nan")))
    data = json.loads(json.dumps(diverged.as_data(), allow_nan=False))
    assert (data["loss"], data["perplexity"], data["bits_per_byte"]) == (None, None, None)


def test_throughput_is_in_tokens() -> None:
    entry = BatchThroughput(2, 0.5, 4.0, 3)
    assert (FOUND.speed(entry), FOUND.speed_unit) == (16.0, "tokens/s")
    assert replace(FOUND, throughput=(entry,)).as_data()["throughput"] == [
        {"batch": 2, "seconds": 0.5, "samples_per_second": 4.0, "passes": 3, "tokens_per_second": 16.0}
    ]
