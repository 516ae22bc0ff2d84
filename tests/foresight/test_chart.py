from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.foresight.entries import entry

from unisono.errors import UsageError
from unisono.foresight.chart import draw_calibration, part_errors


def test_the_chart_is_svg_with_text_and_no_background(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "calibration.svg"
    draw_calibration([entry(0.05), entry(0.2, "1.1"), entry(0.8, "1.1")], "version", path)
    text = path.read_text()
    for words in ("<svg", ">equal<", ">version 1.0<", ">version 1.1<", ">exchanges<", "measured step, ms"):
        assert words in text
    assert "fill: #ffffff" not in text
    with pytest.raises(UsageError, match=r"--chart .*: Is a directory"):
        draw_calibration([entry()], "version", tmp_path)


def test_errors_of_parts_are_shares_of_the_measured_step() -> None:
    found = part_errors(entry(0.065))
    assert list(found) == ["step", "computing", "waiting", "loading", "exchanges", "updates"]
    assert found["step"] == pytest.approx(-0.2)
    assert found["computing"] + found["waiting"] + found["loading"] == pytest.approx(found["step"])


def test_a_ledger_without_runs_and_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the ledger has no runs to draw"):
        draw_calibration([], "version", tmp_path / "chart.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"install '\.\[bench\]'"):
        draw_calibration([entry()], "version", tmp_path / "chart.svg")
