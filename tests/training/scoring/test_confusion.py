from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.training.accuracy import count
from unisono.training.scoring.evaluation import (
    MAX_CLASSES,
    classes_drawn,
    confusion_map,
    count_confusion,
    most_frequent_mistakes,
    recalls,
)
from unisono.view.heat_map import HeatCell, draw_heat_maps


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
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    count_confusion(confusion, scores, right)
    assert np.array_equal(confusion.numpy(), expected)
    assert int(confusion.diagonal().sum()) == int(count(scores, right)[0])


def test_counts_of_batches_add_up_to_those_of_all() -> None:
    scores, labels = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 6
    parts, all_at_once = torch.zeros(2, 6, 6, dtype=torch.int64)
    for first, last in ((0, 7), (7, 7), (7, 20)):
        count_confusion(parts, scores[first:last], labels[first:last])
    count_confusion(all_at_once, scores, labels)
    assert torch.equal(parts, all_at_once)


def test_recall_is_of_a_row_and_precision_of_a_column() -> None:
    counts = np.array([[1, 1, 0], [0, 2, 0], [0, 0, 0]])
    assert recalls(counts) == [0.5, 1.0, None]
    assert recalls(counts.T) == [1.0, 2 / 3, None]


def test_mistakes_are_off_the_diagonal_the_most_frequent_first() -> None:
    counts = np.array([[9, 1, 3], [3, 9, 0], [0, 4, 9]])
    assert most_frequent_mistakes(counts, 3) == [(2, 1, 4), (0, 2, 3), (1, 0, 3)]
    assert most_frequent_mistakes(counts, 99)[-1] == (0, 1, 1)
    assert most_frequent_mistakes(np.diag([1, 2]), 3) == []
    assert counts[0, 0] == 9, "the counts are not changed"


def test_a_cell_has_its_count_and_its_share_of_the_row() -> None:
    names = ["cat", "dog & co", "owl"]
    drawn = confusion_map(np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]]), names)
    assert (drawn.rows, drawn.columns, drawn.ends) == (names, names, ["75.0%", "50.0%", "–"])
    assert drawn.cells == [
        [HeatCell("3", 0.75), HeatCell("1", 0.25), HeatCell("")],
        [HeatCell("2", 0.5), HeatCell("2", 0.5), HeatCell("")],
        [HeatCell(""), HeatCell(""), HeatCell("")],
    ]
    assert (drawn.title, drawn.keys) == ("", ("class", "guess"))


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
    drawn = confusion_map(counts, [f"class {label}" for label in range(count)])
    assert (len(drawn.rows), drawn.columns[-1]) == (MAX_CLASSES, "others")
    assert drawn.title == f"{MAX_CLASSES} of {count} classes: those with most mistakes"
    for label, row in zip(classes_drawn(counts), drawn.cells, strict=True):
        assert sum(int(cell.text or 0) for cell in row) == counts[label].sum()


def test_long_names_are_cut() -> None:
    assert confusion_map(np.eye(2, dtype=np.int64), ("n" * 40, "m")).rows == ["n" * 23 + "…", "m"]


def test_the_picture_of_classes_without_samples() -> None:
    pytest.importorskip("matplotlib")
    assert b">100.0%<" in draw_heat_maps([confusion_map(np.diag([1, 0]), ("a", "b"))], "a title")
