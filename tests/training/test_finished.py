from __future__ import annotations

from pathlib import Path

from unisono.training.checkpoint import Checkpoint, save
from unisono.training.finished import is_finished
from unisono.training.run_directory import CHECKPOINTS, add_metrics


def test_a_run_is_finished_if_its_last_epoch_has_metrics_and_a_complete_checkpoint(tmp_path: Path) -> None:
    assert not is_finished(tmp_path, 1)
    for epoch in (1, 2):
        add_metrics(tmp_path, {"epoch": epoch, "step": 5 * epoch})
        assert not is_finished(tmp_path, epoch), "it was killed before it had written the checkpoint"
        save(tmp_path / CHECKPOINTS, Checkpoint(5 * epoch, {}, {}, {}))
        assert is_finished(tmp_path, epoch)
    assert [is_finished(tmp_path, epochs) for epochs in (1, 2, 3)] == [True, True, False]
    weights = tmp_path / CHECKPOINTS / "step-000000010" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    assert not is_finished(tmp_path, 1), "a run that resumes reports the damage"
