"""A loop of a user's own goes on after a death, with the bits of one that nothing disturbs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import handlers_restored
from tests.data.conftest import known
from tests.progress import Run
from torch import nn

from unisono.data.kinds import RAW
from unisono.elastic import Loop
from unisono.elastic.standby import FOLDER_VARIABLE
from unisono.launch import MEMORY_VARIABLE
from unisono.training.checkpoint.files import save
from unisono.training.checkpoint.layout import Checkpoint

PROGRAM, READING = (Path(__file__).with_name(name) for name in ("summing.py", "reading.py"))


def test_a_loop_that_is_resumed_begins_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = nn.Linear(3, 2), nn.Linear(3, 2)
    save(tmp_path / "checkpoints", Checkpoint(7, {"model": before.state_dict()}, {}, {}))
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "memory"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    alone: Any = SimpleNamespace(rank=0, placement=SimpleNamespace(nodes=((0,),), node_of=lambda _: 0))
    alone.all_gather_object, alone.call_on_root = lambda one: [one], lambda action: action()
    with handlers_restored():
        assert next(Loop(alone, model=now).steps(9)) == 7
    assert torch.equal(now.weight, before.weight)


@pytest.mark.launches
def test_a_loop_goes_on_from_the_state_that_was_kept(tmp_path: Path, unisono: Run, mpiexec: Run) -> None:
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for folder in (disturbed, whole):
        folder.mkdir()
    done = unisono("run", "--elastic", "--ranks", "2", str(PROGRAM), str(disturbed), "8")
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stderr
    steps = [int(line) for line in (disturbed / "steps").read_text().split()]
    assert steps[: steps.index(8) + 1] == list(range(9))
    assert steps[steps.index(8) + 1] in range(1, 9), "a copy was kept after the first step at the latest"
    assert steps[-1] == 11
    plain = mpiexec(1, str(PROGRAM), str(whole), "-1")
    assert plain.returncode == 0, plain.stderr
    assert (disturbed / "hash").read_text() == (whole / "hash").read_text()


@pytest.mark.launches
def test_samples_are_handed_over_to_the_next_ranks(tmp_path: Path, unisono: Run, mpiexec: Run) -> None:
    disturbed, whole, pack = tmp_path / "disturbed", tmp_path / "whole", tmp_path / "pack"
    for folder in (disturbed, whole):
        folder.mkdir()
    samples = [np.random.default_rng(number).integers(0, 256, 64, np.uint8).tobytes() for number in range(60)]
    for name in ("train", "test"):
        known(samples, pack / name, RAW, (8, 8))
    done = unisono("run", "--elastic", "--ranks", "2", str(READING), str(pack), str(disturbed), "8")
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stderr
    assert (disturbed / "notes").read_text() == "storage: 60 of 60 samples were left in memory"
    plain = mpiexec(1, str(READING), str(pack), str(whole), "-1")
    assert plain.returncode == 0, plain.stderr
    assert (whole / "notes").read_text() == ""
    assert (disturbed / "hash").read_text() == (whole / "hash").read_text()
