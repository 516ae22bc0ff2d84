import pytest
import torch
from torch.nn.functional import cross_entropy

from unisono.training.loss import blank_labels, classification_loss


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
    for number, each in enumerate(scores):
        alone = drawn(number)
        cross_entropy(alone, LABELS).backward()
        torch.testing.assert_close(each.grad, alone.grad * (0.3 if number else 1.0))


def test_of_texts_it_is_the_mean_over_all_tokens() -> None:
    scores = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 4, 1], [2, 2, 3]])
    each = [cross_entropy(scores[row, place], labels[row, place]) for row in range(2) for place in range(3)]
    torch.testing.assert_close(classification_loss(scores, labels), torch.stack(each).mean())


def test_blank_labels_have_the_shape_that_the_loss_takes() -> None:
    for scores in (drawn(0), (drawn(0), drawn(1)), torch.zeros(2, 3, 5)):
        assert torch.isfinite(classification_loss(scores, blank_labels(scores)))
