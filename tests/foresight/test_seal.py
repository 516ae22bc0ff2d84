"""Seals of predictions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.foresight.entries import PREDICTION, entry, measured

from unisono.errors import UsageError
from unisono.foresight.ledger import LedgerEntry
from unisono.foresight.seal import (
    Measurement,
    SealedPrediction,
    Seconds,
    disturbance,
    measure,
    read_measurement,
    read_seal,
    seals_of,
    spread,
    write_seal,
)
from unisono.tables import as_json, from_json, parse


def test_a_seal_is_written_once_and_read_with_its_digest(tmp_path: Path) -> None:
    assert seals_of(tmp_path) == []
    seal = write_seal(tmp_path, PREDICTION)
    assert seal.path == tmp_path / "prediction.json"
    assert seal.measurement == tmp_path / "measurement.json"
    assert read_seal(seal.path) == seal
    assert seal.digest == hashlib.sha256(seal.path.read_bytes()).hexdigest()
    assert not seal.path.stat().st_mode & 0o222
    data = json.loads(seal.path.read_bytes())
    assert data["step"] == pytest.approx(0.052)
    assert data["all_steps"] == pytest.approx(52.0)


def test_a_further_seal_stays_beside_the_first(tmp_path: Path) -> None:
    first = write_seal(tmp_path, PREDICTION)
    before = first.path.read_bytes()
    seconds = [write_seal(tmp_path, replace(PREDICTION, low=low)) for low in (0.01, 0.02)]
    assert [seal.path.name for seal in seconds] == ["prediction-2.json", "prediction-3.json"]
    assert seconds[0].measurement.name == "measurement-2.json"
    assert first.path.read_bytes() == before
    assert [read_seal(path).prediction.low for path in seals_of(tmp_path)] == [PREDICTION.low, 0.01, 0.02]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in seals_of(tmp_path))


def test_seals_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot seal the prediction in .*none/prediction.json: No such file"):
        write_seal(tmp_path / "none", PREDICTION)
    with pytest.raises(UsageError, match=r"cannot read .*prediction.json: No such file"):
        read_seal(tmp_path / "prediction.json")
    (tmp_path / "prediction.json").write_text("{}")
    with pytest.raises(UsageError, match=r"prediction.json is no sealed prediction: sealed is missing; the whole has "):
        read_seal(tmp_path / "prediction.json")


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert PREDICTION.step == pytest.approx(0.052)
    assert PREDICTION.from_machine
    assert not replace(PREDICTION, run=replace(PREDICTION.run, machine="")).from_machine


KINDS = ("loading", "computing", "waiting", "communicating", "updating")


def steps_of(*ranks: list[tuple[float, ...]]) -> Seconds:
    return np.array(ranks, np.float32)


def taken(seconds: Seconds, skip: int = 0, period: int = 1) -> Measurement:
    measurement = measure(seconds, KINDS, skip, period)
    assert measurement is not None
    return measurement


def test_parts_are_those_of_the_rank_that_computes_longest() -> None:
    """The example of the module."""
    fast, slow = (0.0, 0.040, 0.014, 0.03, 0.002), (0.0, 0.044, 0.010, 0.03, 0.002)
    measurement = taken(steps_of([fast] * 8, [fast] * 8, [fast] * 8, [slow] * 8))
    assert (measurement.slowest, measurement.steps) == (3, 8)
    assert measurement.step.median == pytest.approx(0.054)
    assert measurement.computing.median == pytest.approx(0.044)
    assert measurement.waiting.median == pytest.approx(0.010)
    assert measurement.communicating.median == pytest.approx(0.03)
    assert measurement.updating.median == pytest.approx(0.002)
    assert measurement.mean_computing == pytest.approx(0.041)


def test_first_steps_and_a_part_of_a_period_are_left_out() -> None:
    rows = [(0.0, 9.0, 0.0, 0.0, 0.0)] * 3
    rows += [(0.0, 1.0, wait, 0.0, 0.0) for wait in (0.0, 0.0, 3.0)] * 3 + [(0.0, 7.0, 7.0, 0.0, 0.0)]
    measurement = taken(steps_of(rows), skip=3, period=3)
    assert (measurement.steps, measurement.skipped, measurement.period) == (9, 3, 3)
    assert measurement.waiting.median == pytest.approx(1.0), "the mean over a period"
    assert measurement.step == measurement.step.__class__(*[pytest.approx(2.0)] * 3)


def test_without_a_whole_period_there_is_no_measurement() -> None:
    rows = [(0.0, 1.0, 0.0, 0.0, 0.0)] * 5
    assert measure(steps_of(rows), KINDS, skip=5) is None
    assert measure(steps_of(rows), KINDS, skip=9) is None
    assert measure(steps_of(rows), KINDS, skip=2, period=4) is None
    assert measure(steps_of(rows), KINDS, skip=2, period=3) is not None


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=40))
def test_a_spread_is_in_order_and_within_the_times(times: list[float]) -> None:
    interval = spread(times)
    assert min(times) <= interval.low <= interval.median <= interval.high <= max(times)


@given(st.floats(1e-3, 10), st.integers(1, 50))
def test_even_steps_are_not_disturbed(seconds: float, count: int) -> None:
    assert disturbance([seconds] * count) == ""


@pytest.mark.parametrize(
    ("step", "sign"),
    [
        ([1.0] * 9 + [2.0] * 3, "the 95th percentile of the step is 2.00 medians"),
        ([1.0] * 5 + [1.2] * 5, "the last third of the steps took 1.20 times"),
        ([1.2] * 5 + [1.0] * 5, "the last third of the steps took 0.83 times"),
        ([1.0] * 9 + [1.4] * 3, "the last third of the steps took 1.40 times"),
        ([1.0, 1.4] * 10, ""),
        ([1.0, 9.0], ""),
        ([0.0] * 9, ""),
    ],
)
def test_signs_of_a_disturbed_machine(step: list[float], sign: str) -> None:
    reason = disturbance(step)
    assert reason.startswith(sign)
    assert bool(reason) == bool(sign)


def test_a_measurement_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "measurement.json"
    with pytest.raises(UsageError, match=r"cannot read .*measurement.json: No such file"):
        read_measurement(path)
    path.write_bytes(as_json(measured(0.04, 0.01)))
    assert read_measurement(path) == measured(0.04, 0.01)
    path.write_text("[]")
    with pytest.raises(UsageError, match=r"measurement.json is no measurement: the whole is a table of keys, not "):
        read_measurement(path)


def test_what_is_written_is_read_back() -> None:
    for kind, value in ((SealedPrediction, PREDICTION), (Measurement, measured(0.1, 0.3)), (LedgerEntry, entry(a="b"))):
        assert from_json(kind, as_json(value), "file") == value


def test_keys_of_later_releases_are_ignored_and_older_files_get_defaults() -> None:
    data = json.loads(as_json(PREDICTION, step=0.052))
    assert data["step"] == 0.052
    assert parse(SealedPrediction, {**data, "temperature": 21}, "file", UsageError, strict=False) == PREDICTION
    del data["time"]
    assert parse(SealedPrediction, data, "file", UsageError, strict=False).time == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": 3}, "file: prediction.run is a table of keys, not the value 3"),
        ({"version": 1}, "file: prediction.version = 1 is not a string"),
        ({"program": {"buckets": 1.5}}, "file: prediction.program.buckets = 1.5 is not a whole number"),
    ],
)
def test_keys_inside_are_named_with_their_tables(change: dict[str, object], message: str) -> None:
    data = json.loads(as_json(entry()))
    data["prediction"] |= change
    with pytest.raises(UsageError, match=message):
        parse(LedgerEntry, data, "file", UsageError, strict=False)
