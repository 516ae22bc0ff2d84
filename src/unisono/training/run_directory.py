"""What a run leaves: its recipe, a line of metrics for each epoch, and checkpoints.

runs/digits-20260131-120000/
├── recipe.toml
├── metrics.jsonl
├── convolutions.json      the ways that were tried, and what each took
├── steps/
│   └── epoch-0001.npz     seconds[rank, step, kind], and the names of the kinds
└── checkpoints/
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w

from unisono.errors import UsageError
from unisono.training.recipe import Recipe, read_recipe, to_dict

RECIPE, METRICS, STEPS, CHECKPOINTS = "recipe.toml", "metrics.jsonl", "steps", "checkpoints"
CONVOLUTIONS = "convolutions.json"


def begin(recipe: Recipe, folder: Path | None) -> Path:
    """Make a run's directory, `folder` or a new one under runs/, with its recipe in it."""
    if folder is None:
        stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        folder = Path("runs") / f"{recipe.name}-{stamp}"
        number = 1
        while folder.exists():
            number += 1
            folder = Path("runs") / f"{recipe.name}-{stamp}-{number}"
    if (folder / RECIPE).exists():
        raise UsageError(f"{folder} holds a run already; go on with it by --resume {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(folder, recipe)
    except OSError as error:
        raise UsageError(f"cannot make the run's folder {folder}: {error.strerror}") from error
    return folder


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Keep the recipe with the run."""
    _replace(folder / RECIPE, tomli_w.dumps(to_dict(recipe)))


def recipe_of(folder: Path, changes: list[str]) -> Recipe:
    """The recipe of a run, with changes made to it. Raises UsageError where there is no run."""
    if not (folder / RECIPE).exists():
        raise UsageError(f"{folder} holds no run: there is no {RECIPE} in it")
    return read_recipe(folder / RECIPE, changes)


def add_metrics(folder: Path, line: dict[str, Any]) -> None:
    """Append a line of metrics."""
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def keep_steps(folder: Path, epoch: int, seconds: npt.NDArray[np.float32], kinds: Sequence[str]) -> None:
    """Keep what the steps of an epoch took, from where the run began or went on: `seconds` of (ranks, steps, kinds)."""
    path = folder / STEPS / f"epoch-{epoch:04d}.npz"
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("wb") as file:
        np.savez_compressed(file, seconds=seconds, kinds=np.array(kinds))
    aside.replace(path)


def forget_after(folder: Path, step: int) -> None:
    """Take away the lines of metrics that are newer than `step`: the run goes on from there."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    kept = []
    for line in lines:
        try:
            if json.loads(line)["step"] > step:
                continue
        except ValueError:  # cut off in the middle when the run was killed
            continue
        kept.append(line + "\n")
    _replace(path, "".join(kept))


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
