import xml.etree.ElementTree as ET

from unisono.view.spans import Place, Span, SpanRow, draw_spans, draw_text

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    SpanRow("main", [Span(0, 2, "f", "forward", "forward: 0 to 2")]),
    SpanRow("", [Span(2, 2.1, "long", "update", "update")]),
]


def test_text_has_a_line_for_each_row() -> None:
    assert draw_text(ROWS) == ["main │f······", "     │        l"]
    assert draw_text([]) == []


def test_boxes_have_their_times_and_labels_where_they_fit() -> None:
    root = ET.fromstring(draw_spans(ROWS, "a title", 40, marks=[(1.0, "1 ms")], arrows=[(Place(0, 2), Place(1, 2))]))
    shown = [one.text for one in root.iter(f"{SVG}text")]
    assert shown == ["a title", "forward", "update", "1 ms", "main", "f"]
    assert [one.findtext(f"{SVG}title") for one in root.iter(f"{SVG}g")] == [None, None, "forward: 0 to 2", "update"]
    assert [one.get("marker-end") for one in root.iter(f"{SVG}path") if one.get("marker-end")] == ["url(#arrow)"]
