import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from unisono.view.svg import (
    COLORS,
    INK,
    PAPER,
    STYLE,
    Place,
    Span,
    SpanRow,
    draw_spans,
    draw_text,
    element,
    legend,
    page,
    text,
    width_of,
)

SVG = "{http://www.w3.org/2000/svg}"


def test_a_page_is_xml_with_text() -> None:
    drawn = page(300, 100, "a < b & c", [text(20, 60, "x<y", fill='"')])
    root = ET.fromstring(drawn)
    assert [node.text for node in root.iter() if node.tag in (f"{SVG}title", f"{SVG}text")] == ["a < b & c"] * 2 + [
        "x<y"
    ]
    assert "prefers-color-scheme: dark" in drawn


def test_a_page_has_room_for_its_title() -> None:
    assert float(ET.fromstring(page(10, 10, "a long title", [])).get("width", "0")) > width_of("a long title")


def test_attributes_have_hyphens_and_short_numbers() -> None:
    assert element("path", stroke_width=1.50, class_="lane") == '<path stroke-width="1.5" class="lane"/>'
    assert element("g", element("path"), element("path")) == "<g><path/>\n<path/></g>"


def test_entries_of_a_legend_do_not_overlap() -> None:
    drawn = [ET.fromstring(markup) for markup in legend(dict.fromkeys(("words", "other", "third"), INK), 40.0)]
    xs = [float(node.get("x", "")) for node in drawn if node.tag == "rect"]
    assert all(after - before > 12 + width_of("words") for before, after in pairwise(xs))


def luminance(color: str) -> float:
    """Relative luminance of a color, as WCAG defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(color: str, other: str) -> float:
    high, low = sorted((luminance(color), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", [PAPER, "#0d1117"])
def test_colors_are_readable_on_light_and_dark(paper: str) -> None:
    assert paper in STYLE
    assert min(contrast(color, paper) for color in COLORS) > 3
    assert contrast(INK if paper == PAPER else "#e6edf3", paper) > 12


ROWS = [
    SpanRow("main", [Span(0, 2, "f", "forward", "forward: 0 to 2")]),
    SpanRow("", [Span(2, 2.1, "long", "update", "update")]),
]


def test_text_has_a_line_for_each_row() -> None:
    assert draw_text(ROWS) == ["main │f······", "     │        l"]
    assert draw_text([]) == []


def test_boxes_have_their_times_and_labels_where_they_fit() -> None:
    root = ET.fromstring(draw_spans(ROWS, "a title", 40, marks=[(1.0, "1 ms")], arrows=[(Place(0, 2), Place(1, 2))]))
    shown = [node.text for node in root.iter(f"{SVG}text")]
    assert shown == ["a title", "forward", "update", "1 ms", "main", "f"]
    assert [node.findtext(f"{SVG}title") for node in root.iter(f"{SVG}g")] == ["forward: 0 to 2", "update"]
    assert [node.get("marker-end") for node in root.iter(f"{SVG}path") if node.get("marker-end")] == ["url(#head)"]
