from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.training.accuracy import Accuracy, accuracy_of, count


def naive(scores: list[list[int]], labels: list[int], guesses: int) -> int:
    """How many labels are among the best guesses of their row; no two scores of a row are equal."""
    right = 0
    for row, label in zip(scores, labels, strict=True):
        right += label in sorted(range(len(row)), key=lambda number: -row[number])[:guesses]
    return right


@st.composite
def guessed(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    classes, samples = draw(st.integers(1, 9)), draw(st.integers(0, 12))
    rows = [list(draw(st.permutations(range(classes)))) for _ in range(samples)]
    return rows, [draw(st.integers(0, classes - 1)) for _ in range(samples)]


@settings(deadline=None)
@given(batches=st.lists(guessed(), min_size=1, max_size=3))
def test_it_counts_what_is_among_the_best_guesses(batches: list[tuple[list[list[int]], list[int]]]) -> None:
    for scores, labels in batches:
        classes = len(scores[0]) if scores else 7
        found = count(torch.tensor(scores, dtype=torch.float32).reshape(-1, classes), torch.tensor(labels).long())
        assert found.tolist() == [
            naive(scores, labels, 1),
            naive(scores, labels, 5),
            len(labels) if classes > 5 else 0,
        ]
        if not labels:
            continue
        accuracy = accuracy_of(found, len(labels))
        assert accuracy.top1 == naive(scores, labels, 1) / len(labels)
        assert accuracy.top5 is None if classes <= 5 else accuracy.top1 <= accuracy.top5 <= 1


def test_the_example() -> None:
    assert accuracy_of(count(torch.tensor([[0.1, 0.7, 0.2, 0, 0, 0]]), torch.tensor([2])), 1) == Accuracy(0.0, 1.0)


def test_counts_of_batches_add_up_and_one_that_is_empty_changes_nothing() -> None:
    scores, labels = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 8
    parts = [count(scores[first:last], labels[first:last]) for first, last in ((0, 7), (7, 7), (7, 20))]
    assert torch.equal(sum(parts), count(scores, labels))
    assert accuracy_of(torch.tensor([3, 9, 12]), 12) == Accuracy(0.25, 0.75)
    assert accuracy_of(torch.tensor([3, 12, 0]), 12) == Accuracy(0.25, None)
    with pytest.raises(RuntimeError):
        count(scores[:3], labels[:4])
