"""Benchmark of the simulation."""

import json

import pytest
from benchmarks.simulation import run

from unisono.placement import regular


def test_a_row_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "regular", lambda *_: regular(2, 2, 1))
    run.simulate_one("halving")
    row = json.loads(capsys.readouterr().out)
    assert (row["schedule"], row["exact"]) == ("halving", True)
    assert row["seconds"] > 0
