"""Seals of predictions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.foresight.entries import PREDICTION

from unisono.errors import UsageError
from unisono.foresight.seal import read_seal, seals_of, write_seal


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
    assert [one.path.name for one in seconds] == ["prediction-2.json", "prediction-3.json"]
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
