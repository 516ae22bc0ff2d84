import xml.etree.ElementTree as ET

import pytest

from unisono.view.heat_map import DARK, DIVERGING, LIGHT, SEQUENTIAL, HeatCell, HeatMap, _luminance, draw_heat_maps

SVG = "{http://www.w3.org/2000/svg}"
CELLS = ((HeatCell("50%", 0.0), HeatCell("–")), (HeatCell("75%", 0.5), HeatCell("100%", 1.0)))
DRAWN = HeatMap("a map", ("down", "across"), ("1", "2"), ("3", "4"), CELLS, ("left", "right"))


def texts(drawn: bytes) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(drawn).iter(f"{SVG}text")]


def test_cells_rows_and_columns_have_their_words() -> None:
    pytest.importorskip("matplotlib")
    shown = texts(draw_heat_maps([DRAWN, DRAWN], "a title"))
    for label in ("a map", "down", "across", "1", "2", "3", "4", "50%", "–", "75%", "100%", "left", "right"):
        assert shown.count(label) == 2, label
    assert shown.count("a title") == 1


def test_maps_that_have_no_room_beside_each_other_have_rows() -> None:
    pytest.importorskip("matplotlib")
    single, many = (
        ET.fromstring(draw_heat_maps([DRAWN] * count, "title")).get("viewBox", "").split() for count in (1, 9)
    )
    assert float(many[2]) <= 12.1 * 72
    assert float(many[3]) > 2 * float(single[3])


def test_names_of_columns_are_read_upwards_where_they_are_much_longer_than_the_cells() -> None:
    short, long = (DRAWN._replace(columns=names) for names in (("cat", "dog"), ("cat", "a long name")))
    assert (short.upright, long.upright) == (False, True)
    assert long.size[1] > short.size[1]


@pytest.mark.parametrize("scale", [SEQUENTIAL, DIVERGING])
def test_words_are_readable_in_cells_of_any_color(scale: str) -> None:
    colormaps = pytest.importorskip("matplotlib").colormaps
    for percent in range(101):
        color = _luminance(colormaps[scale](percent / 100))
        ink = LIGHT if color < 0.18 else DARK
        high, low = sorted((color, _luminance([int(ink[at : at + 2], 16) / 255 for at in (1, 3, 5)])), reverse=True)
        assert (high + 0.05) / (low + 0.05) > 4.2, percent
