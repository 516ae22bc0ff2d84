from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training.sweep.svg_boxes import assert_readable, text_boxes

from unisono.training.curves import Curve
from unisono.training.measures import PERPLEXITY
from unisono.training.sweep.measure_chart import LEADER, WIDTH, draw_measure, spread

words = st.text("abcmw019=, ", min_size=1, max_size=30)


@st.composite
def runs(draw: st.DrawFn) -> list[Curve]:
    found = []
    for name in draw(st.lists(words, min_size=1, max_size=30)):
        shares = draw(st.lists(st.floats(0, 1), min_size=1, max_size=5))
        step = draw(st.floats(1e-2, 1e5))
        epochs = range(1, len(shares) + 1)
        found.append(Curve(name, tuple(epochs), tuple(step * epoch for epoch in epochs), tuple(shares), ()))
    return found


@given(runs(), words)
def test_no_text_overlaps(curves: list[Curve], title: str) -> None:
    assert_readable(draw_measure(curves, title))


@given(runs())
def test_each_run_is_drawn_in_the_area_and_labelled(curves: list[Curve]) -> None:
    drawn = draw_measure(curves, "title")
    shown = [box.words for box in text_boxes(drawn)]
    assert shown[-len(curves) :] == [curve.name for curve in curves]
    left = max(box.right for box in text_boxes(drawn) if box.words.endswith("%"))
    right = left + 8 + WIDTH
    xs = [float(x) for x in re.findall(r'cx="([^"]+)"', drawn)]
    assert len(xs) == sum(len(curve.epochs) for curve in curves)
    assert all(left <= x <= right + 0.1 for x in xs)
    assert text_boxes(drawn)[-1].left == pytest.approx(right + LEADER, abs=0.2)


def test_lines_go_through_the_accuracies() -> None:
    drawn = draw_measure([Curve("one", (1, 2), (60.0, 120.0), (0.0, 1.0), ())], "title")
    (line,) = re.findall(r'<path d="M([\d., L]+)" stroke-width="2"', drawn)
    (x, low), (to_x, high) = (tuple(map(float, point.split(","))) for point in line.split(" L"))
    left = to_x - WIDTH
    assert (x - left) / (to_x - left) == pytest.approx(0.5, abs=1e-3)
    assert low - high == pytest.approx(320, abs=0.2)
    shown = [box.words for box in text_boxes(drawn)]
    for name in ("0%", "100%", "0", "2", "time (min)", "test accuracy"):
        assert name in shown


@pytest.mark.parametrize(("seconds", "unit"), [(0.5, "s"), (119.0, "s"), (120.0, "min"), (7200.0, "h")])
def test_the_unit_of_time_fits(seconds: float, unit: str) -> None:
    assert f">time ({unit})<" in draw_measure([Curve("one", (1,), (seconds,), (0.5,), ())], "title")


def test_close_accuracies_get_close_ticks() -> None:
    curves = [Curve("one", (1, 2), (1.0, 2.0), (0.9712, 0.9731), ())]
    shown = [box.words for box in text_boxes(draw_measure(curves, "title"))]
    ticks = [words for words in shown if words.endswith("%")]
    assert len(ticks) == len(set(ticks))
    assert all(re.fullmatch(r"9[67]\.\d%", words) for words in ticks)


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0.1, 10))
def test_positions_are_spread(wanted: list[float], distance: float) -> None:
    found = spread(wanted, distance, 0, 100)
    apart = min(distance, 100 / max(1, len(wanted) - 1))
    ordered = sorted(found)
    assert all(-1e-9 <= position <= 100 + 1e-9 for position in found)
    assert all(after - before >= apart - 1e-9 for before, after in itertools.pairwise(ordered))
    pairs = sorted(zip(wanted, found, strict=True))
    assert all(one[1] <= other[1] for one, other in itertools.pairwise(pairs) if one[0] < other[0])


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=5))
def test_perplexities_are_drawn_between_their_ticks(values: list[float]) -> None:
    epochs = tuple(range(1, len(values) + 1))
    curve = Curve("one", epochs, tuple(map(float, epochs)), tuple(values), (), PERPLEXITY)
    drawn = draw_measure([curve], "title")
    assert_readable(drawn)
    shown = [box.words for box in text_boxes(drawn)]
    assert "test perplexity" in shown
    assert not [words for words in shown if "%" in words]
    ys = [float(y) for y in re.findall(r'cy="([^"]+)"', drawn)]
    rules = [float(y) for y in re.findall(r'<path class="rule" d="M[\d.]+,([\d.]+) h', drawn)]
    assert len(rules) > 1
    assert all(min(rules) - 0.1 <= y <= max(rules) + 0.1 for y in ys)
