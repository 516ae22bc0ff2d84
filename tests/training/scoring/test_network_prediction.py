from __future__ import annotations

import numpy as np
import pytest
import torch

from unisono.errors import UsageError
from unisono.training.scoring.network_prediction import most_probable

NAMES = ("a", "b", "c")
SCORES = torch.tensor([1.0, 3.0, 2.0])


def test_the_most_probable_come_first_with_their_probabilities() -> None:
    found = most_probable(SCORES, NAMES.__getitem__, 2)
    assert [name for name, _ in found] == ["b", "c"]
    whole = sum(np.exp([1.0, 3.0, 2.0]))
    assert [share for _, share in found] == pytest.approx([np.exp(3) / whole, np.exp(2) / whole], rel=1e-12)
    assert sum(share for _, share in most_probable(SCORES, NAMES.__getitem__, 9)) == pytest.approx(1)


def test_scores_that_are_not_finite_are_no_prediction() -> None:
    with pytest.raises(UsageError, match="not finite"):
        most_probable(torch.tensor([1.0, float("nan")]), NAMES.__getitem__, 1)
