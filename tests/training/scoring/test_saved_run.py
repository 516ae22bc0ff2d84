from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.cli import runs
from unisono.data.builtin import in_memory_feed, load_digits
from unisono.data.feed import Feed
from unisono.data.loading import PROCESSOR
from unisono.errors import CheckpointError, UsageError
from unisono.training import run_directory
from unisono.training.checkpoint.files import save
from unisono.training.checkpoint.layout import Checkpoint
from unisono.training.recipe import Recipe, parse_recipe
from unisono.training.run import make_model
from unisono.training.scoring import evaluate
from unisono.training.scoring.evaluate import load_network, read_run

WORLD: Any = SimpleNamespace(rank=0, size=1)
RECIPE = parse_recipe(Recipe, {"model": {"name": "small_convnet"}}, "a test")


@pytest.fixture
def facts() -> Feed:
    return in_memory_feed(load_digits(), WORLD, 0)


def saved(folder: Path, recipe: Recipe, facts: Feed) -> torch.nn.Module:
    """A run of two checkpoints. Returns the network whose weights the newer one has."""
    run_directory.write_recipe(folder, recipe)
    model = make_model(recipe, facts, PROCESSOR)
    for step in (3, 6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        save(folder / run_directory.CHECKPOINTS, Checkpoint(step, model.state_dict(), {}, {}))
    return model


def test_the_newest_checkpoint_becomes_a_network_in_evaluation_mode(tmp_path: Path, facts: Feed) -> None:
    expected = saved(tmp_path, RECIPE, facts)
    run = read_run(tmp_path)
    assert (run.recipe, run.step, run.notes, run.timings) == (RECIPE, 6, (), {})
    network = load_network(run, facts, PROCESSOR)
    assert not network.training
    for name, value in network.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


def test_a_damaged_checkpoint_is_named_and_stays(tmp_path: Path, facts: Feed) -> None:
    saved(tmp_path, RECIPE, facts)
    damaged = tmp_path / run_directory.CHECKPOINTS / "step-000000006"
    (damaged / "weights.safetensors").write_bytes(b"torn")
    run = read_run(tmp_path)
    assert run.step == 3
    assert run.notes == (
        "step-000000006 is damaged: weights.safetensors does not match its checksum; the previous one is used",
    )
    assert damaged.exists()


def test_a_folder_without_a_run_or_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        read_run(tmp_path)
    run_directory.write_recipe(tmp_path, RECIPE)
    with pytest.raises(CheckpointError, match=r"has no checkpoint yet.*unisono train --resume"):
        read_run(tmp_path)


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_timings_are_read_once_there_are_as_many_threads_as_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    own, before = parse_recipe(Recipe, {"compute": {"threads": 3}}, "a test"), torch.get_num_threads()
    run_directory.write_recipe(tmp_path, own)
    threads = list[int]()

    def read(_: Path) -> None:
        threads.append(torch.get_num_threads())
        raise CheckpointError("none")

    def bind_cores(_: object, count: int) -> tuple[None, list[str]]:
        torch.set_num_threads(count)
        return None, []

    monkeypatch.setattr(evaluate, "read_run", read)
    monkeypatch.setattr(evaluate, "bind_cores", bind_cores)
    monkeypatch.setattr(runs, "keep_memory", lambda: None)
    world: Any = SimpleNamespace(call_on_root=lambda action: action())
    try:
        torch.set_num_threads(1)
        with pytest.raises(CheckpointError, match="none"):
            if command == "evaluate":
                evaluate.evaluate(tmp_path, world, None, False, print)
            else:
                runs.predict(tmp_path, [])
    finally:
        torch.set_num_threads(before)
    assert threads == [3]


def test_weights_of_another_network_do_not_fit(tmp_path: Path, facts: Feed) -> None:
    saved(tmp_path, RECIPE, facts)
    run_directory.write_recipe(tmp_path, parse_recipe(Recipe, {"model": {"name": "resnet8"}}, "a test"))
    with pytest.raises(CheckpointError, match=r"step 6's checkpoint in .* does not fit the recipe's network"):
        load_network(read_run(tmp_path), facts, PROCESSOR)


def test_code_of_the_user_is_reported(tmp_path: Path, facts: Feed) -> None:
    (tmp_path / "mine.py").write_text("from unisono.models.convnet import small_convnet\nown = small_convnet\n")
    own = parse_recipe(Recipe, {"model": {"name": "mine:own", "folder": str(tmp_path)}}, "a test")
    saved(tmp_path, own, facts)
    (note,) = read_run(tmp_path).notes
    assert note.startswith("the run imports user code: module mine, from ")
