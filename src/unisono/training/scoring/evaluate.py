"""Evaluation of a run's newest checkpoint on the ranks of a world.

folder, read by rank 0 ─▶ network on every rank ─ this rank's share of the test set ─▶ counts
counts of all ranks ─ sum ─▶ Evaluation, the same on every rank                     ─▶ rank 0 writes the files
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from unisono.compute.precision import StepContext
from unisono.data.loading import Batch
from unisono.errors import UsageError
from unisono.training.accuracy import accuracy_of, count
from unisono.training.build import DTYPES, bind_cores, context_of
from unisono.training.scoring.confusion import count_confusion
from unisono.training.scoring.confusion_chart import draw_confusion
from unisono.training.scoring.evaluation import Evaluation, as_data
from unisono.training.scoring.saved_run import SavedRun, load_network, read_run
from unisono.training.scoring.test_set import open_test_set
from unisono.training.scoring.throughput import BatchThroughput, measure_throughput
from unisono.world import World

EVALUATION, CONFUSION = "evaluation.json", "confusion.svg"
"""Files of an evaluation."""


def evaluate(
    folder: Path, world: World, pack: Path | None, throughput: bool, log: Callable[[str], None]
) -> tuple[Evaluation, dict[str, Any]]:
    """Return the evaluation of the run in `folder`, and the facts that its files name. Called by all ranks together.

    `pack` is the pack whose test set is evaluated; None for the run's own data. With `throughput`, forward passes are
    timed on rank 0. `log` is called with lines to print, on every rank. Raises UsageError on all ranks.
    """
    share, _ = bind_cores(world)
    run = world.call_on_root(lambda: read_run(folder))
    for note in run.notes:
        log(note)
    recipe, dtype, within = run.recipe, DTYPES[run.recipe.model.dtype], context_of(run.recipe)
    tests = open_test_set(recipe, pack, world, share)
    model = load_network(run, tests)
    on = f"{world.size} rank{'s' * (world.size > 1)}"
    log(f"{folder}: step {run.step}, {tests.samples:,} samples of {tests.title}, {on}")
    counts, confusion = sum_scores(model, tests.batches(recipe.training.batch), tests.classes, dtype, within)
    world.allreduce(counts)
    world.allreduce(confusion)
    timed = tuple[BatchThroughput, ...]()
    if throughput:
        timed = world.call_on_root(lambda: tuple(time_forward(model, tests.blank, dtype, within)))
    tests.close()
    facts = facts_of(run, tests.title, world.size)
    accuracy = accuracy_of(counts, tests.samples)
    return Evaluation(tests.names, confusion.numpy(), accuracy, timed), facts


def sum_scores(
    model: torch.nn.Module, batches: Iterable[Batch], classes: int, dtype: torch.dtype, within: StepContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over the samples of `batches`, to be summed over ranks.

    They are: `accuracy.count`, float64 (4,), and the confusion, int64 (classes, classes).
    """
    counts = torch.zeros(4, dtype=torch.float64)
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    with torch.no_grad():
        for inputs, labels in batches:
            with within():
                scores = model(inputs.to(dtype))
            counts += count(scores, labels)
            confusion += count_confusion(scores, labels)
    return counts, confusion


def time_forward(
    model: torch.nn.Module, blank: Callable[[int], torch.Tensor], dtype: torch.dtype, within: StepContext
) -> Iterable[BatchThroughput]:
    """Yield the throughput of the network's forward passes on inputs from `blank`."""

    def forward(inputs: torch.Tensor) -> None:
        with torch.no_grad(), within():
            model(inputs)

    yield from measure_throughput(forward, lambda samples: blank(samples).to(dtype))


def facts_of(run: SavedRun, title: str, ranks: int) -> dict[str, Any]:
    """Return what an evaluation's file says of its origin."""
    return {
        "run": run.recipe.name,
        "model": run.recipe.model.name,
        "step": run.step,
        "data": title,
        "ranks": ranks,
        "threads": torch.get_num_threads(),
    }


def write_files(found: Evaluation, facts: dict[str, Any], out: Path) -> None:
    """Write the evaluation and the picture of its confusion into the folder `out`. Raises UsageError."""
    title = f"{facts['run']}, step {facts['step']}, on {facts['data']}: top-1 {found.accuracy.top1:.2%}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / EVALUATION).write_text(json.dumps({**facts, **as_data(found)}, indent=1) + "\n")
        (out / CONFUSION).write_text(draw_confusion(found.confusion, found.classes, title), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; name another folder with --out") from error
