import sys
from pathlib import Path

import pytest
from tests.plan.test_run_report import ALONE, FOUR

from unisono.errors import UsageError
from unisono.plan.run_chart import GRAY, draw_chart


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


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


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_text_is_readable_on_light_and_dark(page: str) -> None:
    high, low = sorted((luminance(GRAY), luminance(page)), reverse=True)
    assert (high + 0.05) / (low + 0.05) > 3.5


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"install unisono\[bench\]"):
        draw_chart([ALONE], "a title", "a machine", tmp_path / "chart.svg")
