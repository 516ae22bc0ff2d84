"""Checkpoints are written whole or not at all, and nothing that was there before is lost."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from unisono.errors import CheckpointError
from unisono.training.checkpoint import (
    CHECKPOINTS_KEPT,
    Checkpoint,
    checkpoint_names,
    load_newest,
    load_step,
    save,
    step_of,
)

Trained = Callable[..., Checkpoint]


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full, for whoever writes more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_newest_three_are_kept_and_nothing_else(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / ".step-000000003.tmp").mkdir()
    for step in range(CHECKPOINTS_KEPT + 3):
        save(tmp_path, trained(step))
    assert entries(tmp_path) == ["step-000000003", "step-000000004", "step-000000005"]


def test_newer_ones_are_left_alone(tmp_path: Path, trained: Trained) -> None:
    """They are no older ones that are too many: whoever wants them away removes them."""
    for step in (1, 2, 3, 10, 20, 30):
        (tmp_path / f"step-{step:09d}").mkdir()
    save(tmp_path, trained(5))
    assert [int(name[5:]) for name in checkpoint_names(tmp_path)] == [2, 3, 5, 10, 20, 30]


def test_what_was_set_aside_stays(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "step-000000001.torn").mkdir()
    for step in range(2, 7):
        save(tmp_path, trained(step))
    assert entries(tmp_path) == ["step-000000001.torn", *(f"step-00000000{step}" for step in (4, 5, 6))]


def test_one_of_the_same_step_is_replaced(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(7, done=23))
    save(tmp_path, trained(7, done=0))
    assert load_newest(tmp_path)[0].progress["done"] == 0
    assert entries(tmp_path) == ["step-000000007"]


def test_killed_while_one_is_replaced(tmp_path: Path, trained: Trained) -> None:
    """Between the two renames: the one that was to be replaced is used, and settled by the next save."""
    save(tmp_path, trained(3))
    save(tmp_path, trained(7)).rename(tmp_path / "step-000000007.replaced")
    assert load_newest(tmp_path)[0].step == 7
    save(tmp_path, trained(8))
    assert entries(tmp_path) == [f"step-00000000{step}" for step in (3, 7, 8)]
    (tmp_path / "step-000000008.replaced").mkdir()
    save(tmp_path, trained(9))
    assert entries(tmp_path) == [f"step-00000000{step}" for step in (7, 8, 9)]


def test_others_that_write_at_the_same_time_are_left_alone(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / ".step-000000007.tmp").mkdir(parents=True)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda one: save(tmp_path, one, alone=False), [trained(step) for step in range(10, 90, 5)]))
    assert checkpoint_names(tmp_path)[-3:] == ["step-000000075", "step-000000080", "step-000000085"]
    assert all(load_step(tmp_path, step_of(name)) is not None for name in checkpoint_names(tmp_path))
    assert [path.name for path in tmp_path.glob(".*")] == [".step-000000007.tmp"]
    save(tmp_path, trained(90))
    assert list(tmp_path.glob(".*")) == []


def test_a_full_disk_is_reported_and_older_ones_stay(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained(1))
    large = Checkpoint(2, {"weight": torch.zeros(100_000)}, {"state": {}, "param_groups": []}, {})
    with (
        files_of_at_most(100_000),
        pytest.raises(CheckpointError, match="cannot write the checkpoint of step 2") as reported,
    ):
        save(tmp_path, large)
    assert "resume with --resume" in str(reported.value)
    assert entries(tmp_path) == ["step-000000001"]
    assert load_newest(tmp_path)[0].step == 1


def test_a_disk_that_refuses(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        save(tmp_path / "file" / "checkpoints", trained(1))
    (tmp_path / "away").symlink_to("/nowhere/mounted")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        save(tmp_path / "away", trained(1))


def test_a_checkpoint_that_is_a_link_gives_way_without_its_target(tmp_path: Path, trained: Trained) -> None:
    other = tmp_path / "other"
    save(tmp_path / "checkpoints", trained(1)).rename(other)
    (tmp_path / "checkpoints/step-000000001").symlink_to(other)
    assert load_newest(tmp_path / "checkpoints")[0].step == 1
    for step in (2, 3, 4):
        save(tmp_path / "checkpoints", trained(step))
    assert entries(tmp_path / "checkpoints") == [f"step-00000000{step}" for step in (2, 3, 4)]
    assert "manifest.json" in entries(other)


def test_all_checkpoints_behind_a_link(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "other")
    for step in range(5):
        save(tmp_path / "checkpoints", trained(step))
    assert len(entries(tmp_path / "other")) == CHECKPOINTS_KEPT
    assert load_newest(tmp_path / "checkpoints")[0].step == 4
