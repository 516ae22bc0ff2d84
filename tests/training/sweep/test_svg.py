import itertools
import xml.etree.ElementTree as ET

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.training.sweep.svg_boxes import assert_readable

from unisono.training.sweep.svg import page, text, ticks

numbers = st.floats(1e-6, 1e6)


@given(numbers, numbers)
def test_ticks_enclose_a_range_in_equal_steps(low: float, high: float) -> None:
    assume(high - low > 1e-3 * high)
    found = ticks(low, high)
    assert found[0] <= low * (1 + 1e-6) + 1e-9
    assert found[-1] >= high * (1 - 1e-6) - 1e-9
    assert 3 <= len(found) <= 8
    step = found[1] - found[0]
    assert [after - before for before, after in itertools.pairwise(found)] == pytest.approx([step] * (len(found) - 1))


def test_a_page_is_xml_with_text() -> None:
    drawn = page(300, 100, "a < b & c", [text(20, 60, "x<y")])
    root = ET.fromstring(drawn)
    assert [element.text for element in root.iter() if element.tag.endswith(("title", "text"))] == [
        "a < b & c",
        "a < b & c",
        "x<y",
    ]
    assert "prefers-color-scheme: dark" in drawn


def test_overlapping_texts_are_found() -> None:
    with pytest.raises(AssertionError):
        assert_readable(page(300, 100, "title", [text(20, 60, "one"), text(30, 62, "other")]))
    with pytest.raises(AssertionError):
        assert_readable(page(60, 100, "title", [text(20, 60, "too wide a text")]))
