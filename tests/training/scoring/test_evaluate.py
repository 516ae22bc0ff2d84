from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from unisono.errors import UsageError
from unisono.training.accuracy import Accuracy, accuracy_of
from unisono.training.scoring.evaluate import CONFUSION, EVALUATION, sum_scores, write_files
from unisono.training.scoring.evaluation import Evaluation

FOUND = Evaluation(("cat", "dog"), np.array([[1, 1], [0, 2]]), Accuracy(0.75, None, 0.5))
FACTS = {"run": "pets", "step": 7, "data": "packs/pets/test"}


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_sums_of_batches_are_those_of_all_samples(batch: int) -> None:
    random = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(20, 4, generator=random, dtype=torch.float64), torch.arange(20) % 7
    model = torch.nn.Linear(4, 7).double()
    cuts = [slice(first, first + batch) for first in range(0, 20, batch)]
    counts, confusion = sum_scores(model, [(inputs[cut], labels[cut]) for cut in cuts], 7, torch.float64, nullcontext)
    with torch.no_grad():
        scores = model(inputs)
    right = scores.argmax(1) == labels
    assert accuracy_of(counts, 20).loss == pytest.approx(float(cross_entropy(scores, labels)), rel=1e-12)
    assert accuracy_of(counts, 20).top1 == float(right.double().mean())
    assert int(confusion.sum()) == 20
    assert int(confusion.diagonal().sum()) == int(right.sum())
    assert confusion.sum(1).tolist() == torch.bincount(labels, minlength=7).tolist()


def test_a_rank_without_samples_adds_nothing() -> None:
    counts, confusion = sum_scores(torch.nn.Linear(4, 7), [], 7, torch.float32, nullcontext)
    assert (counts.tolist(), int(confusion.sum())) == ([0, 0, 0, 0], 0)


def test_files_go_into_a_folder_that_is_made(tmp_path: Path) -> None:
    write_files(FOUND, FACTS, tmp_path / "a" / "b")
    data = json.loads((tmp_path / "a" / "b" / EVALUATION).read_text())
    assert {**FACTS, "samples": 4, "loss": 0.5, "top1": 0.75}.items() <= data.items()
    assert "pets, step 7, on packs/pets/test: top-1 75.00%" in (tmp_path / "a" / "b" / CONFUSION).read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*file.*--out"):
        write_files(FOUND, FACTS, tmp_path / "file")
