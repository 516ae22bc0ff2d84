"""Evaluation of a run's newest checkpoint on the ranks of a world.

folder, read by rank 0 ─▶ network on every rank ─ this rank's share of the test set ─▶ counts
counts of all ranks ─ sum ─▶ Evaluation, the same on every rank                     ─▶ rank 0 writes the files

Ranks count labels: samples, or for texts tokens. So a rank with more windows of text has more weight, as in training.
The test set is that of the run's data, or of another pack with the same classes; every sample is evaluated once:

    run's pack/train     classes, mean and std, kind ─▶ the transform that the network was trained with
    any pack/test        samples ─ transform ─▶ inputs

A pack without test/ is taken as a whole: PACK/train evaluates the training set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.binding import CoreShare
from unisono.compute.convolution_plan import ConvolutionPlan, Times, machine, read_plan
from unisono.compute.prepare import StepContext, prepare
from unisono.data.builtin import BUILTIN_DATASETS, RowReader
from unisono.data.feed import check_alike, check_on_all, has_other_classes, is_same_data
from unisono.data.kinds import make_transform
from unisono.data.loading import Batch, InputFacts, Prefetcher, Reader, cast_inputs, to_device
from unisono.data.options import DataOptions
from unisono.data.pack import INDEX, TEST_SPLITS, TRAIN_SPLITS, check_installed, split_folder
from unisono.device import module_of
from unisono.errors import CheckpointError, PackError, UsageError
from unisono.files import naming_os_errors, write_atomically
from unisono.processor import HOST, processor
from unisono.training import run_directory
from unisono.training.accuracy import accuracy_of, count
from unisono.training.checkpoint.files import load_newest, load_weights
from unisono.training.checkpoint.layout import checkpoint_names
from unisono.training.recipe import Recipe, threads_of
from unisono.training.run import DTYPES, bind_cores, context_of, decoding_threads, make_model, take_device
from unisono.training.scoring.evaluation import BatchThroughput, Evaluation, count_confusion, measure_throughput
from unisono.training.state import fitting
from unisono.user_function import UserFunction, is_user_function
from unisono.world import World

if TYPE_CHECKING:
    from unisono.data.pack.index import Index

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
    recipe = world.call_on_root(lambda: run_directory.past_recipe(folder))
    share, _ = bind_cores(world, threads_of(recipe))  # before it is read: timings are those of so many threads
    run, dtype = world.call_on_root(lambda: read_run(folder)), DTYPES[recipe.model.dtype]
    for note in run.notes:
        log(note)
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

    def timed() -> tuple[BatchThroughput, ...]:
        passes = measure_throughput(
            lambda inputs: module_of(device).synchronize(forward(inputs).device),
            lambda samples: cast_inputs(tests.blank(samples).to(device), dtype),
        )
        return tuple(passes)

    speeds = world.call_on_root(timed) if throughput else ()
    tests.close()
    evaluation = Evaluation(
        samples=tests.samples,
        accuracy=accuracy_of(counts, tests.samples * tests.labels_per_sample),
        classes=() if text else tests.names,
        confusion=None if confusion is None else confusion.numpy(),
        tokens_per_sample=tests.labels_per_sample,
        bytes_per_token=tests.bytes_per_label,
        throughput=speeds,
    )
    facts = {"run": recipe.name, "model": recipe.model.name, "step": run.step, "data": tests.title}
    return evaluation, {**facts, "ranks": world.size, "threads": torch.get_num_threads()}


Forward = Callable[[torch.Tensor], torch.Tensor]
"""Forward pass of a network on inputs of any number format, on any device."""


def forward_of(model: torch.nn.Module, dtype: torch.dtype, within: StepContext, device: torch.device) -> Forward:
    """Return the forward pass of a network of this number format on a device, without gradients."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), within():
            scores: torch.Tensor = model(cast_inputs(inputs.to(device), dtype))
        return scores

    return forward


def sum_scores(
    forward: Forward, batches: Iterable[Batch], classes: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return sums over the labels of `batches`, to be summed over ranks: `accuracy.count`, float64 (4,), and the
    confusion, int64 (classes, classes), or None for no `classes`."""
    counts = torch.zeros(4, dtype=torch.float64)
    confusion = None if classes is None else torch.zeros(classes, classes, dtype=torch.int64)
    for inputs, labels in batches:
        scores = forward(inputs)
        targets, counts = labels.to(scores.device), counts.to(scores.device)
        counts += count(scores, targets)
        if confusion is not None:
            confusion = confusion.to(scores.device)
            count_confusion(confusion, scores, targets)
    return counts.cpu(), None if confusion is None else confusion.cpu()


def write_files(evaluation: Evaluation, facts: dict[str, Any], out: Path) -> list[Path]:
    """Write the evaluation and its images into the folder `out`. Return the files. Raises UsageError where the disk
    refuses; files of an evaluation before are then still there."""
    title = f"{facts['run']}, step {facts['step']}, on {facts['data']}"
    data = json.dumps({**facts, **evaluation.as_data()}, indent=1) + "\n"
    files = {EVALUATION: data.encode(), **evaluation.images(title)}
    with naming_os_errors(f"cannot write {out}", remedy="; name another folder with --out"):
        out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as all_written:  # none is renamed before all are
            for name, content in files.items():
                all_written.enter_context(write_atomically(out / name)).write_bytes(content)
    return [out / name for name in files]


# Run -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRun:
    """A run as its folder has it."""

    folder: Path
    recipe: Recipe
    step: int
    """Steps that the newest complete checkpoint was made after; with an asynchronous rule, of all workers."""
    weights: dict[str, Any]
    """State of the network in that checkpoint."""
    timings: dict[str, Times]
    """Timings of convolution algorithms that the run chose by; empty if they are of another machine."""
    notes: tuple[str, ...]
    """Lines to report: damaged checkpoints, code of the user, other data."""


def read_run(folder: Path) -> SavedRun:
    """Return the saved state of the run in `folder`, which is not changed. Raises UsageError where it holds no run,
    CheckpointError where it has no complete checkpoint or one cannot be read, PackError as `compare_training_set`."""
    recipe = run_directory.past_recipe(folder)
    checkpoints = folder / run_directory.CHECKPOINTS
    if not checkpoint_names(checkpoints):
        raise CheckpointError(
            f"{folder} has no checkpoint yet: it is written at the end of an epoch; train on with unisono train "
            f"--resume {folder}"
        )
    checkpoint, damaged = load_newest(checkpoints)
    notes = [f"{error}; the previous one is used" for error in damaged]
    network = UserFunction("model", recipe.model.name, recipe.model.folder)
    if is_user_function(network.name):
        notes.append(f"the run imports user code: {network.where()}")
    if recipe.data.pack and (trained := str(checkpoint.progress.get("data", "")).split(", ")[0]):
        notes += compare_training_set(trained, Path(recipe.data.pack))
    timings = read_plan(folder / run_directory.CONVOLUTIONS, machine(processor().name))
    return SavedRun(folder, recipe, checkpoint.step, checkpoint.weights, timings, tuple(notes))


def compare_training_set(trained: str, pack: Path) -> list[str]:
    """Return a line where the training set of a pack is not that of the fingerprint `trained`, by which numbers are
    normalised. Raises PackError where its classes are others, or in another order: names would be wrong."""
    check_installed()
    from unisono.data.pack.index import read_index  # noqa: PLC0415  of the extra `data`

    train = read_index(split_folder(pack, TRAIN_SPLITS))
    if is_same_data(trained, now := train.fingerprint):
        return []
    if has_other_classes(trained, now):
        raise PackError(
            f"{train.folder} has other classes than the run was trained on, or in another order; put its pack there"
        )
    return [f"the run was trained on other data ({trained}) than {train.folder} has now ({now})"]


def load_network(run: SavedRun, facts: InputFacts, device: torch.device) -> torch.nn.Module:
    """Return the run's network with the weights of the checkpoint, in evaluation mode, for inputs of these `facts`.

    Convolutions on a processor use the algorithms of the run. Raises CheckpointError where the weights do not fit.
    """
    model = make_model(run.recipe, facts, device)
    if run.recipe.compute.convolutions == "autotune" and device.type == HOST:
        plan = ConvolutionPlan()
        plan.freeze(run.timings)
        prepare(model, plan)
    remedy = "give the network the code that it was trained with"
    with fitting(f"step {run.step}'s checkpoint in {run.folder}", "network", remedy):
        load_weights(model, run.weights)
    return model.eval()


# Test set ------------------------------------------------------------------------------------------------------------


def open_test_set(recipe: Recipe, pack: Path | None, world: World, share: CoreShare, device: torch.device) -> Reader:
    """Return the test set of the recipe's data, or of `pack`, to be copied to a device. Called by all ranks together.

    Raises PackError where a pack cannot be read, or its classes or samples are others than those of the run's;
    UsageError for a `pack` beside a run that was trained on no pack.
    """
    name, trained_on = recipe.data.name, recipe.data.pack
    if not trained_on:
        if pack is not None:
            raise UsageError(f"--pack {pack}: the run was trained on {name}, which is no pack; omit --pack")
        data = BUILTIN_DATASETS[name]()
        return RowReader(data, data.test, world)
    check_installed()
    from unisono.data.storage import read_storage  # noqa: PLC0415  of the extra `data`

    train, test = world.call_on_all(lambda: read_both(Path(trained_on), pack))
    check_on_all(test.folder, f"{train.fingerprint}, {test.fingerprint}", world)
    storage = read_storage(DataOptions(), test, world)
    transform = make_transform(train, recipe.data)
    return Prefetcher(test, storage, transform, decoding_threads(recipe.data, share), device=device)


def read_both(trained_on: Path, pack: Path | None) -> tuple[Index, Index]:
    """Return the indexes of the training set of a run, and of the test set to evaluate. Raises PackError."""
    from unisono.data.pack.index import read_index  # noqa: PLC0415  of the extra `data`

    train = read_index(split_folder(trained_on, TRAIN_SPLITS))
    folder = trained_on if pack is None else pack
    test = read_index(folder if (folder / INDEX).is_file() else split_folder(folder, TEST_SPLITS))
    check_alike(train, test)
    return train, test
