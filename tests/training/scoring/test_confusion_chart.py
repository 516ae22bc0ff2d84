from __future__ import annotations

import re

import numpy as np
from tests.training.sweep.svg_boxes import assert_readable

from unisono.training.scoring.confusion_chart import MAX_CLASSES, classes_drawn, draw_confusion
from unisono.training.sweep.heat_map import color_of


def texts(drawn: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", drawn)


def test_a_cell_has_its_count_and_the_color_of_its_share_of_the_row() -> None:
    drawn = draw_confusion(np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]]), ("cat", "dog & co", "owl"), "a run")
    assert texts(drawn) == [
        *("a run", "guess", "class", "cat", "dog &amp; co", "owl", "recall"),
        *("cat", "3", "1", "75.0%"),
        *("dog &amp; co", "2", "2", "50.0%"),
        *("owl", "–"),
    ]
    assert re.findall(r'fill="(#\w+)"/>', drawn) == [color_of(share) for share in (0.75, 0.25, 0.5, 0.5)]
    assert drawn.count('class="empty"') == 5
    assert_readable(drawn)


def test_names_are_level_where_they_fit_and_read_upwards_elsewhere() -> None:
    counts = np.diag([1000, 2000])
    short, long = (draw_confusion(counts, names, "names") for names in (("a", "b"), ("a", "long name")))
    assert "rotate" not in short
    assert long.count("rotate(-90 ") == 2
    assert_readable(short)
    assert_readable(long)


def test_of_many_classes_those_with_most_mistakes_are_drawn_and_the_rest_is_one_column() -> None:
    count = MAX_CLASSES + 10
    counts = np.diag(np.full(count, 50))
    counts[5, 39] = 7  # both classes have mistakes
    counts[2, 3] = 9
    drawn_classes = classes_drawn(counts)
    assert len(drawn_classes) == MAX_CLASSES
    assert {2, 3, 5, 39} <= set(drawn_classes)
    assert drawn_classes == sorted(drawn_classes)
    counts[5, 38] = 4  # 38 has fewer mistakes than others below
    counts[38, 38] = 0
    for other in range(MAX_CLASSES):
        counts[other, (other + 1) % MAX_CLASSES] += 20
    found = draw_confusion(counts, [f"class {number}" for number in range(count)], "many")
    assert "others" in texts(found)
    assert f"{MAX_CLASSES} of {count} classes: those with most mistakes" in texts(found)
    assert_readable(found)


def test_long_names_are_cut() -> None:
    assert "n" * 23 + "…" in texts(draw_confusion(np.eye(2, dtype=np.int64), ("n" * 40, "m"), "names"))
