import json
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.training.recipe import Recipe
from unisono.training.run_directory import METRICS, add_metrics, begin, forget_after, recipe_of


def test_a_run_keeps_its_recipe(tmp_path: Path) -> None:
    folder = begin(Recipe(name="mine"), tmp_path / "run")
    assert recipe_of(folder, []) == Recipe(name="mine")
    assert recipe_of(folder, ["ranks=3"]).ranks == 3
    with pytest.raises(UsageError, match="holds a run already; go on with it by --resume"):
        begin(Recipe(), folder)
    with pytest.raises(UsageError, match="holds no run"):
        recipe_of(tmp_path, [])


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({begin(Recipe(name="mine"), None) for _ in range(3)}) == 3


def test_metrics_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        add_metrics(tmp_path, {"step": step})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4')  # the run was killed here
    forget_after(tmp_path, 20)
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [10, 20]
