from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.training.accuracy import count
from unisono.training.scoring.confusion import (
    Mistake,
    count_confusion,
    most_frequent_mistakes,
    precisions,
    recalls,
)


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
