"""Dataclasses as JSON and back."""

from __future__ import annotations

import json

import pytest
from tests.foresight.entries import PREDICTION, entry, measured

from unisono.errors import UsageError
from unisono.foresight.form import as_json, from_data, from_json
from unisono.foresight.ledger import LedgerEntry
from unisono.foresight.measurement import Measurement, Spread
from unisono.foresight.seal import SealedPrediction


def test_what_is_written_is_read_back() -> None:
    for kind, value in ((SealedPrediction, PREDICTION), (Measurement, measured(0.1, 0.3)), (LedgerEntry, entry(a="b"))):
        assert from_json(kind, as_json(value)) == value


def test_keys_of_later_releases_are_ignored_and_older_files_get_defaults() -> None:
    data = json.loads(as_json(PREDICTION, step=0.052))
    assert data["step"] == 0.052
    assert from_data(SealedPrediction, {**data, "temperature": 21}) == PREDICTION
    del data["time"]
    assert from_data(SealedPrediction, data).time == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"median": 1', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "the whole is list, not a table"),
        (b'{"median": 1, "low": 1}', "high is missing"),
        (b'{"median": "1", "low": 1, "high": 1}', "median = '1'; it is a number"),
        (b'{"median": true, "low": 1, "high": 1}', "median = True; it is a number"),
        (b'{"median": NaN, "low": 1, "high": 1}', "median = nan; it is a number"),
    ],
)
def test_other_content_is_refused_by_its_key(content: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_json(Spread, content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": 3}, "prediction.run is int, not a table"),
        ({"version": 1}, r"prediction.version = 1; it is text"),
        ({"program": {"buckets": 1.5}}, r"prediction.program.buckets = 1.5; it is a whole number"),
    ],
)
def test_keys_inside_are_named_with_their_tables(change: dict[str, object], words: str) -> None:
    data = json.loads(as_json(entry()))
    data["prediction"] |= change
    with pytest.raises(UsageError, match=words):
        from_data(LedgerEntry, data)


def test_labels_are_texts() -> None:
    data = json.loads(as_json(entry()))
    data["labels"] = {"nodes": 4}
    with pytest.raises(UsageError, match=r"labels = .*; it is a table of texts"):
        from_data(LedgerEntry, data)
