from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from unisono.errors import CheckpointError, RecipeError, UsageError
from unisono.training.checkpoint.files import save
from unisono.training.checkpoint.layout import Checkpoint
from unisono.training.recipe import Recipe
from unisono.training.run_directory import (
    CHAIN,
    CHECKPOINTS,
    METRICS,
    STEPS,
    RunLock,
    add_metrics,
    create_run,
    is_finished,
    new_folder,
    past_recipe,
    read_metrics,
    recipe_of,
    replace_file,
    truncate_lines,
    write_steps,
)


def test_a_run_keeps_its_recipe(tmp_path: Path) -> None:
    lock = RunLock()
    folder = create_run(Recipe(name="mine"), tmp_path / "run", lock)
    lock.release()
    assert recipe_of(folder, []) == Recipe(name="mine")
    assert recipe_of(folder, ["ranks=3"]).ranks == 3
    with pytest.raises(UsageError, match="holds a run already; resume it with --resume"):
        create_run(Recipe(), folder, RunLock())
    with pytest.raises(UsageError, match="holds no run"):
        recipe_of(tmp_path, [])


def test_a_run_whose_period_an_older_release_measured_needs_a_number(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[rule]\nname = "local_sgd"\nevery = "auto"\n')
    with pytest.raises(RecipeError, match=r'rule.every = "auto" was measured .*: --set rule.every=16'):
        recipe_of(tmp_path, ["training.epochs=3"])
    for changes in (["rule.every=8", "training.epochs=3"], ["training.epochs=3", "rule.every=8"]):
        recipe = recipe_of(tmp_path, changes)
        assert (recipe.rule.name, recipe.rule.options["every"], recipe.training.epochs) == ("local_sgd", 8, 3)
    assert past_recipe(tmp_path).rule.name == "local_sgd", "what it has written can be read"


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({create_run(Recipe(name="mine"), None, RunLock()) for _ in range(3)}) == 3


def test_a_half_written_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    for epoch in (1, 2):
        add_metrics(tmp_path, {"epoch": epoch})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"epoch": 3, "elap')
    assert read_metrics(tmp_path) == [{"epoch": 1}, {"epoch": 2}]


def test_a_file_is_replaced_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"other"):
        replace_file(path, content)
        assert path.read_bytes() == content

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*file: No space left on device; free space or repair"):
        replace_file(path, b"third")
    assert path.read_bytes() == b"other"


def test_metrics_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        add_metrics(tmp_path, {"step": step})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4')  # the run was killed here
    truncate_lines(tmp_path, 20)
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [10, 20]


def test_a_chain_keeps_no_line_of_a_later_step(tmp_path: Path) -> None:
    """Whether the run goes on with a chain or without."""
    lines = [b'{"step": %d, "chain": "?"}\n' % step for step in range(4)]
    (tmp_path / CHAIN).write_bytes(b"".join(lines) + b'{"step": 1}')
    truncate_lines(tmp_path, 2)
    assert (tmp_path / CHAIN).read_bytes() == b"".join(lines[:3])


def test_metrics_that_are_not_ours_stay(tmp_path: Path) -> None:
    lines = [
        b'{"step": 10}\n',
        b'{"note": "warmer room"}\n',
        b"3\n",
        b'{"step": null}\n',
        b'{"step": 30}\n',
        b'{"st\xff',
    ]
    (tmp_path / METRICS).write_bytes(b"".join(lines))
    truncate_lines(tmp_path, 20)
    assert (tmp_path / METRICS).read_bytes() == b"".join(lines[:4])


def test_nothing_to_forget_changes_nothing(tmp_path: Path) -> None:
    truncate_lines(tmp_path, 20)
    assert list(tmp_path.iterdir()) == []
    add_metrics(tmp_path, {"step": 10})
    before = (tmp_path / METRICS).stat()
    truncate_lines(tmp_path, 20)
    assert (tmp_path / METRICS).stat() == before


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*metrics\.jsonl: Is a directory; .* --resume"):
        add_metrics(tmp_path, {"step": 10})
    (tmp_path / STEPS).write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*epoch-0001\.npz"):
        write_steps(tmp_path, 1, np.zeros((1, 1, 1), np.float32), ("loading",))


def test_a_run_whose_folder_another_process_holds_for_it(tmp_path: Path) -> None:
    lock = RunLock()
    lock.take(tmp_path)
    create_run(Recipe(), tmp_path, None)
    with pytest.raises(UsageError, match="in use by process"):
        RunLock().take(tmp_path)
    lock.release()


def test_a_new_run_in_a_folder_that_is_in_use(tmp_path: Path) -> None:
    lock = RunLock()
    create_run(Recipe(), tmp_path / "run", lock)
    with pytest.raises(UsageError, match="run is in use by process"):
        create_run(Recipe(), tmp_path / "run", RunLock())
    lock.release()


def test_what_steps_took_is_read_by_numpy(tmp_path: Path) -> None:
    seconds = np.arange(2 * 3 * 2, dtype=np.float32).reshape(2, 3, 2)
    write_steps(tmp_path, 7, seconds, ("loading", "computing"))
    with np.load(tmp_path / STEPS / "epoch-0007.npz") as archive:
        assert archive["kinds"].tolist() == ["loading", "computing"]
        assert archive["seconds"].dtype == np.float32
        assert np.array_equal(archive["seconds"], seconds)


def test_an_epoch_that_is_made_again_has_its_new_steps(tmp_path: Path) -> None:
    """As after a run was killed; nothing else is left there."""
    for epoch, steps in ((1, 4), (2, 3), (2, 5)):
        write_steps(tmp_path, epoch, np.full((1, steps, 1), epoch, np.float32), ("loading",))
    assert sorted(path.name for path in (tmp_path / STEPS).iterdir()) == ["epoch-0001.npz", "epoch-0002.npz"]
    with np.load(tmp_path / STEPS / "epoch-0002.npz") as archive:
        assert archive["seconds"].shape == (1, 5, 1)


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


@pytest.mark.parametrize("name", ["", "a/b", ".."])
def test_a_name_that_is_none_of_a_folder(name: str) -> None:
    with pytest.raises(UsageError, match=r"name = '.*'; it begins the name of a folder"):
        new_folder(name)
