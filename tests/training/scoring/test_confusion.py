from __future__ import annotations

import re

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.sweep.svg_boxes import assert_readable

from unisono.training.accuracy import count
from unisono.training.scoring.confusion import (
    MAX_CLASSES,
    Mistake,
    classes_drawn,
    count_confusion,
    draw_confusion,
    most_frequent_mistakes,
    precisions,
    recalls,
)
from unisono.training.sweep.heat_map import color_of


@given(
    classes=st.integers(1, 8),
    labels=st.lists(st.integers(0, 7), max_size=20),
    seed=st.integers(0, 99),
    levels=st.integers(1, 5),
)
def test_it_counts_pairs_of_label_and_guess(classes: int, labels: list[int], seed: int, levels: int) -> None:
    """With few levels, scores are often equal: the guess is still that of the accuracy."""
    right = torch.tensor([label % classes for label in labels], dtype=torch.int64)
    scores = torch.randint(levels, (len(labels), classes), generator=torch.Generator().manual_seed(seed)).float()
    expected = np.zeros((classes, classes), np.int64)
    for row, label in zip(scores, right.tolist(), strict=True):
        expected[label, int(row.topk(min(5, classes)).indices[0])] += 1
    found = count_confusion(scores, right)
    assert np.array_equal(found.numpy(), expected)
    assert int(found.diagonal().sum()) == int(count(scores, right)[0])


def test_counts_of_batches_add_up_to_those_of_all() -> None:
    scores, labels = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 6
    parts = [count_confusion(scores[first:last], labels[first:last]) for first, last in ((0, 7), (7, 7), (7, 20))]
    assert torch.equal(sum(parts), count_confusion(scores, labels))


def test_recall_is_of_a_row_and_precision_of_a_column() -> None:
    counts = np.array([[1, 1, 0], [0, 2, 0], [0, 0, 0]])
    assert recalls(counts) == [0.5, 1.0, None]
    assert precisions(counts) == [1.0, 2 / 3, None]


def test_mistakes_are_off_the_diagonal_the_most_frequent_first() -> None:
    counts = np.array([[9, 1, 3], [3, 9, 0], [0, 4, 9]])
    assert most_frequent_mistakes(counts, 3) == [Mistake(2, 1, 4), Mistake(0, 2, 3), Mistake(1, 0, 3)]
    assert most_frequent_mistakes(counts, 99)[-1] == Mistake(0, 1, 1)
    assert most_frequent_mistakes(np.diag([1, 2]), 3) == []
    assert counts[0, 0] == 9, "the counts are not changed"


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
