"""Record of the samples of an elastic run: lost steps do not count; missing, repeated and other samples are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.elastic.sample_keys import check, keys_of, network

from unisono.data.builtin import load_digits
from unisono.data.order import permutation
from unisono.elastic.standby import FOLDER_VARIABLE, GENERATION_VARIABLE
from unisono.reducer.virtual_ranks import seed_of_share
from unisono.training.trainer import seed_of_step

BATCH, SHARES, STEPS = 480, 2, 3


def train(home: Path, monkeypatch: pytest.MonkeyPatch, generation: int, steps: range, order: np.ndarray) -> None:
    """Pass the shares of some steps through the network, as a rank does."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(home))
    monkeypatch.setenv(GENERATION_VARIABLE, str(generation))
    model, data = network(10, 1), load_digits().train
    torch.manual_seed(generation)
    model(data.inputs[:3])  # tried before the first step
    for step in steps:
        keys = order[step * BATCH :][:BATCH]
        for share in (1, 0):
            torch.manual_seed(seed_of_share(seed_of_step(0, step, 0), share))
            model(data.inputs[torch.from_numpy(keys[len(keys) * share // 2 : len(keys) * (share + 1) // 2])])
    model.eval()
    model(data.inputs[:3])


def test_of_each_step_the_last_generation_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, order = tmp_path / "run", permutation(1437, 0, 0)
    train(home, monkeypatch, 1, range(2), order[::-1].copy())  # all of which is lost
    train(home, monkeypatch, 2, range(2), order)
    train(home, monkeypatch, 10, range(1, STEPS), order)
    with next(keys_of(home).glob("2-*")).open("ab") as file:
        file.write(b"cut off")
    assert check(keys_of(home), 0, 1, BATCH, SHARES) == "3 steps, each once"


def test_what_is_missing_twice_or_in_disorder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, order = tmp_path / "run", permutation(1437, 0, 0)
    train(home, monkeypatch, 1, range(2), order)
    with pytest.raises(ValueError, match="step 2, share 0: 0 samples"):
        check(keys_of(home), 0, 1, BATCH, SHARES)
    swapped = order.copy()
    swapped[[600, 700]] = swapped[[700, 600]]
    train(home, monkeypatch, 2, range(1, STEPS), swapped)
    with pytest.raises(ValueError, match="step 1, share 0: 240 samples"):
        check(keys_of(home), 0, 1, BATCH, SHARES)
    train(home, monkeypatch, 2, range(1, STEPS), order)
    with pytest.raises(ValueError, match="step 1, share 1 was made twice in a generation"):
        check(keys_of(home), 0, 1, BATCH, SHARES)
