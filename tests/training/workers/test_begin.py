"""Beginning of a resumed run: what it removes, and the state in which its servers and workers begin."""

from __future__ import annotations

from pathlib import Path

import torch

from unisono.asynchronous.event_log import EventLog, read_order
from unisono.training import run_directory
from unisono.training.checkpoint import Checkpoint, checkpoint_names, save
from unisono.training.workers.begin import discard_newer
from unisono.training.workers.snapshots import worker_folder


def snapshot(home: Path, worker: int, cut: int) -> None:
    save(worker_folder(home, worker), Checkpoint(cut, {"w": torch.zeros(1)}, {}, {}))


def snapshots(home: Path, workers: int) -> list[list[str]]:
    return [checkpoint_names(worker_folder(home, worker)) for worker in range(workers)]


def test_what_is_newer_than_the_cut_is_removed(tmp_path: Path) -> None:
    """A second death may leave a new centre 40 beside worker 1's snapshot 40 of before, if that stays."""
    for worker, cuts in enumerate([(20, 30), (20, 30, 40)]):
        for cut in cuts:
            snapshot(tmp_path, worker, cut)
    for epoch, step in enumerate((20, 30, 40)):
        run_directory.add_metrics(tmp_path, {"epoch": epoch + 1, "step": step})
    log = EventLog(tmp_path, 0)
    for number in range(5):
        log.add(number=number, worker=number % 2)
    log.close()
    discard_newer(tmp_path, [3], 30)
    assert snapshots(tmp_path, 2) == [["step-000000020", "step-000000030"]] * 2
    assert [line["step"] for line in run_directory.read_metrics(tmp_path)] == [20]  # the epoch of 30 ends again
    assert read_order(tmp_path, 0) == [0, 1, 0]


def test_a_run_that_begins_again_has_no_snapshots(tmp_path: Path) -> None:
    for worker in range(12):  # worker-10 too
        snapshot(tmp_path, worker, 0)
    discard_newer(tmp_path, [0], -1)
    assert snapshots(tmp_path, 12) == [[]] * 12
