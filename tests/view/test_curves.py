import xml.etree.ElementTree as ET

import pytest

from unisono.view.curves import Line, draw_curves

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawn: bytes) -> list[str]:
    return ["".join(one.itertext()) for one in ET.fromstring(drawn).iter(f"{SVG}text")]


def test_lines_are_named_from_the_highest_to_the_lowest_end() -> None:
    pytest.importorskip("matplotlib")
    lines = [
        Line("one", (1, 2), (60.0, 120.0), (0.5, 0.6)),
        Line("one, beside", (1, 2), (60.0, 120.0), (0.8, 0.9), beside=True),
        Line("other", (1, 2), (50.0, 100.0), (0.6, 0.7)),
    ]
    shown = texts(draw_curves(lines, "test accuracy", True, "a title"))
    assert [one for one in shown if one in ("one", "one, beside", "other")] == ["one, beside", "other", "one"]
    for words in ("a title", "test accuracy", "minutes", "epochs", "90%"):
        assert words in shown


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0.5, "seconds"), (119.0, "seconds"), (120.0, "minutes"), (7200.0, "hours")]
)
def test_the_unit_of_time_fits(seconds: float, unit: str) -> None:
    pytest.importorskip("matplotlib")
    assert unit in texts(draw_curves([Line("one", (1,), (seconds,), (0.5,))], "test perplexity", False))
