from __future__ import annotations

import re
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training.sweep.svg_boxes import assert_readable, text_boxes
from tests.training.sweep.test_report import results

from unisono.training.measures import ACCURACY, PERPLEXITY
from unisono.training.sweep.heat_map import (
    DARK_INK,
    LIGHT_INK,
    HeatMap,
    color_of,
    draw_heat_maps,
    heat_maps,
)
from unisono.training.sweep.plan import parse_grid


def test_two_keys_make_one_heat_map() -> None:
    grid = parse_grid(["rule.every=1,4", "optimizer.learning_rate=0.05,0.1,0.2"])
    assert heat_maps(grid, results(grid, [0.1, 0.2, 0.3, 0.4, None, 0.6])) == [
        HeatMap(
            "",
            ("every", "learning_rate"),
            ("1", "4"),
            ("0.05", "0.1", "0.2"),
            ((0.1, 0.2, 0.3), (0.4, None, 0.6)),
        )
    ]


def test_one_key_makes_none() -> None:
    grid = parse_grid(["rule.every=1,4", "training.epochs=3"])
    assert heat_maps(grid, results(grid, [0.1, 0.2])) == []


def test_other_keys_make_a_heat_map_for_each_combination() -> None:
    keys = ["rule.every=1,4", "optimizer.learning_rate=0.05,0.1", "optimizer.name=sgd,lars", "optimizer.momentum=0,0.9"]
    grid = parse_grid(keys)
    found = heat_maps(grid, results(grid, [number / 16 for number in range(16)]))
    assert [drawn.title for drawn in found] == [
        "name = sgd, momentum = 0",
        "name = sgd, momentum = 0.9",
        "name = lars, momentum = 0",
        "name = lars, momentum = 0.9",
    ]
    assert found[1].cells == ((1 / 16, 5 / 16), (9 / 16, 13 / 16))


def test_seeds_are_averaged_where_two_other_keys_are_swept() -> None:
    grid = parse_grid(["training.seed=0,1", "rule.every=1,4", "optimizer.learning_rate=0.05,0.1"])
    (drawn,) = heat_maps(grid, results(grid, [0.1, 0.2, 0.3, None, 0.3, 0.4, 0.5, None]))
    assert drawn.keys == ("every", "learning_rate")
    assert drawn.cells == ((pytest.approx(0.2), pytest.approx(0.3)), (pytest.approx(0.4), None))
    grid = parse_grid(["training.seed=0,1", "rule.every=1,4"])
    (drawn,) = heat_maps(grid, results(grid, [0.1, 0.2, 0.3, 0.4]))
    assert drawn.keys == ("seed", "every")


words = st.text("abcmw019._:", min_size=1, max_size=18)
labels = st.lists(words, min_size=2, max_size=5).map(tuple)


@st.composite
def drawings(draw: st.DrawFn) -> list[HeatMap]:
    rows, columns, keys = draw(labels), draw(labels), draw(st.tuples(words, words))
    share = st.none() | st.floats(0, 1)
    cells = st.tuples(*[st.tuples(*[share] * len(columns))] * len(rows))
    titles = draw(st.lists(words, min_size=1, max_size=5)) if draw(st.booleans()) else [""]
    return [HeatMap(title, keys, rows, columns, draw(cells)) for title in titles]


@given(drawings(), words)
def test_no_text_overlaps(maps: list[HeatMap], title: str) -> None:
    assert_readable(draw_heat_maps(maps, ACCURACY, title))


def test_cells_have_their_accuracy_as_text() -> None:
    drawn = draw_heat_maps(
        [HeatMap("", ("a", "b"), ("1", "2"), ("3", "4"), ((0.5, None), (0.75, 1.0)))], ACCURACY, "title"
    )
    shown = [box.words for box in text_boxes(drawn)]
    assert shown == ["title", "50.00%", "100.00%", "a", "1", "50.00%", "–", "2", "75.00%", "100.00%", "3", "4", "b"]
    assert drawn.count('class="empty"') == 1


def test_the_lowest_perplexity_is_the_darkest_and_a_diverged_run_has_no_color() -> None:
    drawn = draw_heat_maps([HeatMap("", ("a", "b"), ("1",), ("2", "3", "4"), ((4.0, 30.0, inf),))], PERPLEXITY, "title")
    shown = [box.words for box in text_boxes(drawn)]
    assert shown == ["title", "30.00", "4.00", "a", "1", "4.00", "30.00", "inf", "2", "3", "4", "b"]
    cells = re.findall(r'height="33.0"(.*?)/>', drawn)
    assert [cell.strip() for cell in cells] == [f'fill="{color_of(1)}"', f'fill="{color_of(0)}"', 'class="empty"']


def luminance(color: str) -> float:
    """Relative luminance of a color, as WCAG defines it."""
    parts = [int(part, 16) / 255 for part in re.findall("..", color.removeprefix("#"))]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@given(st.floats(0, 1))
def test_numbers_are_readable_in_cells_of_any_color(share: float) -> None:
    drawn = draw_heat_maps([HeatMap("", ("a", "b"), ("1",), ("2", "3", "4"), ((0.0, share, 1.0),))], ACCURACY, "title")
    ink = re.findall(r'fill="(#\w+)">', drawn)[1]
    assert ink in (LIGHT_INK, DARK_INK)
    light, dark = sorted((luminance(ink), luminance(color_of(share))), reverse=True)
    assert (light + 0.05) / (dark + 0.05) > 4


def test_colors_get_darker_with_accuracy() -> None:
    found = [luminance(color_of(number / 50)) for number in range(51)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 51
