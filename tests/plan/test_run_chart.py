import sys
from pathlib import Path

import pytest
from tests.plan.test_run_report import ALONE, FOUR

from unisono.errors import UsageError
from unisono.plan.run_chart import draw_chart


def test_the_chart_is_svg_with_text_and_no_background(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.svg"
    draw_chart([ALONE, FOUR], "a title", "a machine", path)
    text = path.read_text()
    for words in ("<svg", "a title", ">bsp<", ">ideal<", "speedup over one node", ">computing<", ">communication<"):
        assert words in text
    assert "fill: #ffffff" not in text
    with pytest.raises(UsageError, match=r"--chart .*: Is a directory"):
        draw_chart([ALONE, FOUR], "a title", "a machine", tmp_path)


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"install '\.\[bench\]'"):
        draw_chart([ALONE], "a title", "a machine", tmp_path / "chart.svg")
