"""Evaluation of a run's newest checkpoint on the ranks of a world.

folder, read by rank 0 ─▶ network on every rank ─ this rank's share of the test set ─▶ counts
counts of all ranks ─ sum ─▶ Evaluation, the same on every rank                     ─▶ rank 0 writes the files

Ranks count labels: samples, or for texts tokens. So a rank with more windows of text has more weight, as in training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from unisono.compute.prepare import StepContext
from unisono.data.loading import PROCESSOR, Batch, cast_inputs, to_device
from unisono.device import module_of
from unisono.errors import UsageError
from unisono.files import write_atomically
from unisono.training.accuracy import accuracy_of, count
from unisono.training.build import DTYPES, bind_cores, context_of, take_device
from unisono.training.scoring.confusion import count_confusion
from unisono.training.scoring.evaluation import BatchThroughput, Evaluation, measure_throughput
from unisono.training.scoring.saved_run import load_network, read_run
from unisono.training.scoring.test_set import open_test_set
from unisono.world import World

EVALUATION = "evaluation.json"
"""File of an evaluation."""


def evaluate(
    folder: Path,
    world: World,
    pack: Path | None,
    throughput: bool,
    log: Callable[[str], None],
    device_name: str | None = None,
) -> tuple[Evaluation, dict[str, Any]]:
    """Return the evaluation of the run in `folder`, and the facts that its files name. Called by all ranks together.

    `pack` is the pack whose test set is evaluated; None for the run's own data. With `throughput`, forward passes are
    timed on rank 0. `log` is called with lines to print, on every rank. `device_name` names the device of each rank as
    in a recipe; None for that of the run. Raises UsageError on all ranks.
    """
    share, _ = bind_cores(world)
    run = world.call_on_root(lambda: read_run(folder))
    for note in run.notes:
        log(note)
    recipe, dtype = run.recipe, DTYPES[run.recipe.model.dtype]
    device = take_device(device_name or recipe.compute.device, world)
    tests = open_test_set(recipe, pack, world, share, device)
    model = load_network(run, tests, device)
    on = f"{world.size} rank{'s' * (world.size > 1)}"
    log(f"{folder}: step {run.step}, {tests.samples:,} samples of {tests.title}, {on}")
    text, forward = tests.labels_are_tokens, forward_of(model, dtype, context_of(recipe, device), device)
    batches = to_device(tests.in_turn(recipe.training.batch), device)
    counts, confusion = sum_scores(forward, batches, None if text else tests.classes)
    world.allreduce(counts)
    if confusion is not None:
        world.allreduce(confusion)
    timed = tuple[BatchThroughput, ...]()
    if throughput:
        timed = world.call_on_root(
            lambda: tuple(
                measure_throughput(
                    lambda inputs: module_of(device).synchronize(forward(inputs).device),
                    lambda samples: cast_inputs(tests.blank(samples).to(device), dtype),
                )
            )
        )
    tests.close()
    found = Evaluation(
        samples=tests.samples,
        accuracy=accuracy_of(counts, tests.samples * tests.labels_per_sample),
        classes=() if text else tests.names,
        confusion=None if confusion is None else confusion.numpy(),
        tokens_per_sample=tests.labels_per_sample,
        bytes_per_token=tests.bytes_per_label,
        throughput=timed,
    )
    return found, {
        "run": recipe.name,
        "model": recipe.model.name,
        "step": run.step,
        "data": tests.title,
        "ranks": world.size,
        "threads": torch.get_num_threads(),
    }


Forward = Callable[[torch.Tensor], torch.Tensor]
"""Forward pass of a network on inputs of any number format, on any device."""


def forward_of(
    model: torch.nn.Module, dtype: torch.dtype, within: StepContext, device: torch.device = PROCESSOR
) -> Forward:
    """Return the forward pass of a network of this number format on a device, without gradients."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), within():
            scores: torch.Tensor = model(cast_inputs(inputs.to(device), dtype))
        return scores

    return forward


def sum_scores(
    forward: Forward, batches: Iterable[Batch], classes: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sums over the labels of `batches`, to be summed over ranks.

    They are: `accuracy.count`, float64 (4,), and the confusion, int64 (classes, classes), or None for no `classes`.
    """
    counts = torch.zeros(4, dtype=torch.float64)
    confusion = None if classes is None else torch.zeros(classes, classes, dtype=torch.int64)
    for inputs, labels in batches:
        scores = forward(inputs)
        own, counts = labels.to(scores.device), counts.to(scores.device)
        counts += count(scores, own)
        if confusion is not None:
            confusion = confusion.to(scores.device)
            confusion += count_confusion(scores, own)
    return counts.cpu(), None if confusion is None else confusion.cpu()


def write_files(found: Evaluation, facts: dict[str, Any], out: Path) -> list[Path]:
    """Write the evaluation and its images into the folder `out`. Return the files.

    Raises UsageError where the disk refuses; files of an evaluation before are then still there.
    """
    title = f"{facts['run']}, step {facts['step']}, on {facts['data']}"
    data = json.dumps({**facts, **found.as_data()}, indent=1) + "\n"
    files = {EVALUATION: data.encode(), **found.images(title)}
    paths = [out / name for name in files]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as all_written:  # none is renamed before all are
            for path, content in zip(paths, files.values(), strict=True):
                all_written.enter_context(write_atomically(path)).write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; name another folder with --out") from error
    return paths
