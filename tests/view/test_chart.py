from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unisono.errors import UsageError
from unisono.view.chart import Bar, Line, Times, draw_bars, draw_curves, draw_times, no_pictures, render, write_picture
from unisono.view.svg import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def words(figure: Figure) -> None:
    figure.subplots().set_title("a title & more")


def test_text_stays_text_and_follows_the_reader_s_scheme() -> None:
    pytest.importorskip("matplotlib")
    drawn = render(words, 4, 3).decode()
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert "a title &amp; more" in drawn
    assert "prefers-color-scheme: dark" in drawn
    assert "currentColor" in drawn
    assert INK not in drawn.replace(f"color: {INK}", "")


def test_the_same_chart_is_the_same_file() -> None:
    pytest.importorskip("matplotlib")
    assert render(words, 4, 3) == render(words, 4, 3)


def test_other_formats() -> None:
    pytest.importorskip("matplotlib")
    assert render(words, 4, 3, "png").startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="Format 'xyz' is not supported"):
        render(words, 4, 3, "xyz")


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"a picture needs matplotlib: pip install '\.\[view\]'"):
        render(words, 4, 3)
    assert no_pictures().startswith("no pictures, as matplotlib is not installed: pip install '.[view]'")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--chart .*: Is a directory"):
        write_picture(tmp_path, b"", "--chart")
    with pytest.raises(UsageError, match=r"--chart .*x.png: the picture is SVG; name it x.svg"):
        write_picture(tmp_path / "x.png", b"<svg ", "--chart")


SVG = "{http://www.w3.org/2000/svg}"


def texts(drawn: bytes) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(drawn).iter(f"{SVG}text")]


def test_lines_are_named_from_the_highest_to_the_lowest_end() -> None:
    pytest.importorskip("matplotlib")
    lines = [
        Line("one", (1, 2), (60.0, 120.0), (0.5, 0.6)),
        Line("one, beside", (1, 2), (60.0, 120.0), (0.8, 0.9), beside=True),
        Line("other", (1, 2), (50.0, 100.0), (0.6, 0.7)),
    ]
    shown = texts(draw_curves(lines, "test accuracy", True, "a title"))
    assert [text for text in shown if text in ("one", "one, beside", "other")] == ["one, beside", "other", "one"]
    for label in ("a title", "test accuracy", "minutes", "epochs", "90%"):
        assert label in shown


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0.5, "seconds"), (119.0, "seconds"), (120.0, "minutes"), (7200.0, "hours")]
)
def test_the_unit_of_time_fits(seconds: float, unit: str) -> None:
    pytest.importorskip("matplotlib")
    assert unit in texts(draw_curves([Line("one", (1,), (seconds,), (0.5,))], "test perplexity", False))


pytest.importorskip("matplotlib")

SOME, NONE = Times([4, 8], [1e-6, 2e-6], [1e-6, 1e-6], [2e-6, 3e-6]), Times([], [], [], [])


@pytest.mark.parametrize(("short", "long"), [(SOME, SOME), (SOME, NONE), (NONE, SOME)])
def test_short_and_long_payloads_have_panels_of_their_own(short: Times, long: Times) -> None:
    """A benchmark of few sizes has one of them alone."""
    drawn = draw_times({"ring": short}, {"ring": long}, ("ring",), "allreduce").decode()
    assert "allreduce" in drawn
    assert drawn.count("payload") == 2 - (NONE in (short, long))


def test_bars_have_a_panel_each() -> None:
    drawn = draw_bars({"forward": {"conv1": Bar(2e-3, 1e-3)}, "backward": {}}, ["conv1"], "AlexNet").decode()
    assert all(word in drawn for word in ("forward", "backward", "conv1", "AlexNet"))
