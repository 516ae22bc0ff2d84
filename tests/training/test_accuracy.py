from __future__ import annotations

from math import exp, inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from unisono.training.accuracy import Accuracy, accuracy_of, blank_labels, classification_loss, count


def naive(scores: list[list[int]], labels: list[int], guesses: int) -> int:
    """How many labels are among the best guesses of their row; no two scores of a row are equal."""
    right = 0
    for row, label in zip(scores, labels, strict=True):
        right += label in sorted(range(len(row)), key=lambda guess: -row[guess])[:guesses]
    return right


@st.composite
def guessed(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    classes, samples = draw(st.integers(1, 9)), draw(st.integers(0, 12))
    rows = [list(draw(st.permutations(range(classes)))) for _ in range(samples)]
    return rows, [draw(st.integers(0, classes - 1)) for _ in range(samples)]


@given(batches=st.lists(guessed(), min_size=1, max_size=3))
def test_it_counts_what_is_among_the_best_guesses(batches: list[tuple[list[list[int]], list[int]]]) -> None:
    for scores, labels in batches:
        classes = len(scores[0]) if scores else 7
        counts = count(torch.tensor(scores, dtype=torch.float32).reshape(-1, classes), torch.tensor(labels).long())
        assert counts[:3].tolist() == [
            naive(scores, labels, 1),
            naive(scores, labels, 5),
            len(labels) if classes > 5 else 0,
        ]
        if not labels:
            continue
        accuracy = accuracy_of(counts, len(labels))
        assert accuracy.top1 == naive(scores, labels, 1) / len(labels)
        assert accuracy.top5 is None if classes <= 5 else accuracy.top1 <= accuracy.top5 <= 1


def test_the_example() -> None:
    accuracy = accuracy_of(count(torch.tensor([[0.1, 0.7, 0.2, 0, 0, 0]]), torch.tensor([2])), 1)
    assert (accuracy.top1, accuracy.top5, round(accuracy.loss, 2)) == (0.0, 1.0, 1.79)
    assert accuracy.perplexity == pytest.approx(exp(accuracy.loss))


def test_of_texts_each_token_counts() -> None:
    scores, labels = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0)), torch.arange(12).view(3, 4) % 7
    assert torch.equal(count(scores, labels), count(scores.view(12, 7), labels.view(12)))
    loss = cross_entropy(scores.view(12, 7), labels.view(12)).item()
    assert accuracy_of(count(scores, labels), 12).loss == pytest.approx(loss)


def test_a_loss_too_large_for_an_exponential_is_infinite() -> None:
    assert Accuracy(0.0, None, 1e9).perplexity == inf


def test_counts_of_batches_add_up_and_one_that_is_empty_changes_nothing() -> None:
    scores, labels = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 8
    parts = [count(scores[first:last], labels[first:last]) for first, last in ((0, 7), (7, 7), (7, 20))]
    torch.testing.assert_close(sum(parts), count(scores, labels), rtol=1e-6, atol=0)
    assert accuracy_of(torch.tensor([3, 9, 12, 6]), 12) == Accuracy(0.25, 0.75, 0.5)
    assert accuracy_of(torch.tensor([3, 12, 0, 6]), 12) == Accuracy(0.25, None, 0.5)
    with pytest.raises(RuntimeError):
        count(scores[:3], labels[:4])


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)


LABELS = torch.tensor([0, 2, 1, 1])


def test_of_one_score_it_is_the_cross_entropy() -> None:
    scores = drawn(0)
    assert torch.equal(classification_loss(scores, LABELS), cross_entropy(scores, LABELS))
    assert torch.equal(classification_loss((scores,), LABELS), cross_entropy(scores, LABELS))


def test_auxiliary_scores_weigh_three_tenths_each() -> None:
    scores = tuple(drawn(seed) for seed in range(3))
    loss = classification_loss(scores, LABELS)
    own, first, second = (cross_entropy(each, LABELS).item() for each in scores)
    assert loss.item() == pytest.approx(own + 0.3 * (first + second))
    loss.backward()
    for index, each in enumerate(scores):
        alone = drawn(index)
        cross_entropy(alone, LABELS).backward()
        torch.testing.assert_close(each.grad, alone.grad * (0.3 if index else 1.0))


def test_of_texts_it_is_the_mean_over_all_tokens() -> None:
    scores = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 4, 1], [2, 2, 3]])
    each = [cross_entropy(scores[row, place], labels[row, place]) for row in range(2) for place in range(3)]
    torch.testing.assert_close(classification_loss(scores, labels), torch.stack(each).mean())


def test_auxiliary_scores_of_texts_are_those_of_all_tokens() -> None:
    scores = torch.randn(2, 3, 3, 3, generator=torch.Generator().manual_seed(0)).unbind()
    labels = torch.tensor([[0, 2, 1], [2, 2, 0], [1, 0, 0]])
    own, auxiliary = (classification_loss(each, labels) for each in scores)
    torch.testing.assert_close(classification_loss(scores, labels), own + 0.3 * auxiliary)


def test_blank_labels_have_the_shape_that_the_loss_takes() -> None:
    for scores in (drawn(0), (drawn(0), drawn(1)), torch.zeros(2, 3, 5)):
        assert torch.isfinite(classification_loss(scores, blank_labels(scores)))
