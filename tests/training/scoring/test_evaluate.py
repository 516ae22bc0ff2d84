from __future__ import annotations

import json
import resource
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from unisono.data.loading import PROCESSOR
from unisono.errors import UsageError
from unisono.training.accuracy import Accuracy, accuracy_of
from unisono.training.scoring.evaluate import EVALUATION, forward_of, sum_scores, write_files
from unisono.training.scoring.evaluation import CONFUSION, Evaluation

ACCURACY = Accuracy(0.75, None, 0.5)
FOUND = Evaluation(samples=4, accuracy=ACCURACY, classes=("cat", "dog"), confusion=np.array([[1, 1], [0, 2]]))
FACTS = {"run": "pets", "step": 7, "data": "packs/pets/test"}


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_sums_of_batches_are_those_of_all_samples(batch: int) -> None:
    random = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(20, 4, generator=random, dtype=torch.float64), torch.arange(20) % 7
    model = torch.nn.Linear(4, 7).double()
    cuts = [slice(first, first + batch) for first in range(0, 20, batch)]
    forward = forward_of(model, torch.float64, nullcontext, PROCESSOR)
    counts, confusion = sum_scores(forward, [(inputs[cut], labels[cut]) for cut in cuts], 7)
    with torch.no_grad():
        scores = model(inputs)
    right = scores.argmax(1) == labels
    assert accuracy_of(counts, 20).loss == pytest.approx(float(cross_entropy(scores, labels)), rel=1e-12)
    assert accuracy_of(counts, 20).top1 == float(right.double().mean())
    assert confusion is not None
    assert int(confusion.sum()) == 20
    assert int(confusion.diagonal().sum()) == int(right.sum())
    assert confusion.sum(1).tolist() == torch.bincount(labels, minlength=7).tolist()


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_each_token_counts_once_in_batches_of_any_length(batch: int) -> None:
    """The oracle takes one token at a time. Tokens stay integers."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (7, 5), generator=random)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    torch.manual_seed(0)
    model = torch.nn.Embedding(9, 9).double()
    batches = [(inputs[first : first + batch], labels[first : first + batch]) for first in range(0, 7, batch)]
    counts, confusion = sum_scores(forward_of(model, torch.float64, nullcontext, PROCESSOR), batches, None)
    assert confusion is None
    losses, right = [], 0
    with torch.no_grad():
        for given, wanted in zip(inputs.flatten().tolist(), labels.flatten().tolist(), strict=True):
            chances = model.weight[given].softmax(0)
            losses.append(-float(chances[wanted].log()))
            right += int(chances.argmax()) == wanted
    accuracy = accuracy_of(counts, 28)
    assert accuracy.loss == pytest.approx(sum(losses) / 28, rel=1e-12)
    assert accuracy.top1 == right / 28


def test_a_rank_without_samples_adds_nothing() -> None:
    counts, confusion = sum_scores(torch.nn.Linear(4, 7), [], 7)
    assert confusion is not None
    assert (counts.tolist(), int(confusion.sum())) == ([0, 0, 0, 0], 0)


def test_files_go_into_a_folder_that_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    pytest.importorskip("matplotlib")
    assert write_files(FOUND, FACTS, folder) == [folder / EVALUATION, folder / CONFUSION]
    data = json.loads((folder / EVALUATION).read_text())
    assert {**FACTS, "samples": 4, "loss": 0.5, "top1": 0.75}.items() <= data.items()
    assert "pets, step 7, on packs/pets/test: top-1 75.00%" in (folder / CONFUSION).read_text()


def test_an_evaluation_that_the_disk_refuses_leaves_the_one_before(tmp_path: Path) -> None:
    """The first file fits, its picture does not."""
    pytest.importorskip("matplotlib")
    (first, _) = write_files(FOUND, FACTS, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(first.read_text()) + 1, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"cannot write .*: File too large; name another folder with --out"):
            write_files(FOUND, {**FACTS, "step": 8}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_texts_have_no_picture(tmp_path: Path) -> None:
    texts = Evaluation(samples=4, accuracy=ACCURACY, tokens_per_sample=8, bytes_per_token=1)
    assert write_files(texts, FACTS, tmp_path) == [tmp_path / EVALUATION]
    assert [path.name for path in tmp_path.iterdir()] == [EVALUATION]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*file.*--out"):
        write_files(FOUND, FACTS, tmp_path / "file")
