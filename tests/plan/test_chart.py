import sys
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.plan.chart import GRAY, chart


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_text_is_readable_on_light_and_dark(page: str) -> None:
    high, low = sorted((luminance(GRAY), luminance(page)), reverse=True)
    assert (high + 0.05) / (low + 0.05) > 3.5


def test_a_chart_is_not_begun_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"install '\.\[bench\]'"), chart(tmp_path / "chart.svg", (4, 3)):
        pytest.fail("it was begun")
