import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unisono.errors import UsageError
from unisono.view.chart import no_pictures, render, write_picture
from unisono.view.svg import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def words(figure: "Figure") -> None:
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
