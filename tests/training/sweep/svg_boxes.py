"""Boxes of the texts of an SVG diagram."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple
from xml.etree import ElementTree

from unisono.training.sweep.svg import CHARACTER_WIDTH, FONT_SIZE

SVG = "{http://www.w3.org/2000/svg}"


class TextBox(NamedTuple):
    """Text and the rectangle that it covers, by an upper bound of the width of its characters.

    Text is level, or is read upwards: rotated by -90 degrees around its start.
    """

    words: str
    left: float
    top: float
    right: float
    bottom: float


def text_boxes(drawn: str) -> list[TextBox]:
    """Boxes of all texts that are shown."""
    found: list[TextBox] = []
    _collect(ElementTree.fromstring(drawn), 0.0, 0.0, found)
    return found


def _collect(element: ElementTree.Element, x: float, y: float, found: list[TextBox]) -> None:
    upwards = element.get("transform", "").startswith("rotate(-90 ")
    if (moved := element.get("transform")) and not upwards:
        dx, dy = moved.removeprefix("translate(").removesuffix(")").split(",")
        x, y = x + float(dx), y + float(dy)
    if element.tag == f"{SVG}text":
        width = CHARACTER_WIDTH * len(element.text)
        start = {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor")]
        left, base = x + float(element.get("x")) - start, y + float(element.get("y"))
        above, below = 0.8 * FONT_SIZE, 0.25 * FONT_SIZE
        if upwards:
            found.append(TextBox(element.text, left - above, base - width, left + below, base))
            return
        found.append(TextBox(element.text, left, base - above, left + width, base + below))
    for child in element:
        _collect(child, x, y, found)


def assert_readable(drawn: str) -> None:
    """Assert that no text overlaps another, and that all are on the page."""
    page = ElementTree.fromstring(drawn)
    boxes = text_boxes(drawn)
    for box in boxes:
        assert box.left >= 0, box
        assert box.top >= 0, box
        assert box.right <= float(page.get("width")), box
        assert box.bottom <= float(page.get("height")), box
    for one, other in combinations(boxes, 2):
        apart = (
            one.right <= other.left
            or other.right <= one.left
            or one.bottom <= other.top + 0.11  # coordinates are rounded
            or other.bottom <= one.top + 0.11
        )
        assert apart, (one, other)
