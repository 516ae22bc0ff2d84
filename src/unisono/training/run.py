"""Carries a recipe out on the ranks of a world: trains, tests, keeps checkpoints, says how it goes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.data import DATA
from unisono.data.dataset import Dataset
from unisono.data.order import permutation, share, steps_of
from unisono.errors import CheckpointError, RecipeError
from unisono.models import MODELS
from unisono.rules import BSP, Exchange
from unisono.training import run_directory
from unisono.training.checkpoint import Checkpoint, load_newest, save
from unisono.training.progress import Report
from unisono.training.recipe import Recipe
from unisono.training.recorder import KINDS
from unisono.training.trainer import Trainer
from unisono.world import World

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass
class Place:
    """How far a run has come: `step` steps in all, `done` of them in `epoch`, whose loss so far sums to `loss`."""

    epoch: int = 0
    done: int = 0
    step: int = 0
    loss: float = 0.0


def train(recipe: Recipe, world: World, folder: Path | None, resume: bool) -> None:
    """Run `recipe`, in `folder` (None: a new one under runs/), from its newest checkpoint if `resume`."""
    data = _load(recipe, world)
    trainer = _make_trainer(recipe, world, data)
    if resume:
        assert folder is not None, "a run is resumed in its own folder"
        place, notes = _go_on(folder, trainer, world)
        world.on_root(lambda: run_directory.write_recipe(folder, recipe))
    else:
        new, place, notes = folder, Place(), []
        folder = world.on_root(lambda: run_directory.begin(recipe, new))
    with Report(world.rank == 0, recipe.training.epochs) as report:
        for note in notes:
            report.say(note)
        on = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
        report.say(f"{recipe.name}: {world.size} ranks on {on}, {len(data.train)} samples, into {folder}")
        started = time.perf_counter()
        accuracy, seen = None, 0
        while place.epoch < recipe.training.epochs:
            begun = time.perf_counter()
            first = place.done
            _train_epoch(recipe, world, trainer, data, place, folder, report)
            seconds = time.perf_counter() - begun
            samples = len(data.train) - first * recipe.training.batch
            loss, accuracy = _agree(place.loss, world) / len(data.train), trainer.evaluate(data.test, recipe.training.batch)
            seen += samples
            place = Place(place.epoch + 1, 0, place.step)
            metrics = {
                "epoch": place.epoch,
                "step": place.step,
                "loss": loss,
                "test_accuracy": accuracy,
                "samples_per_second": samples / seconds,
                "seconds": seconds,
                **_split(trainer, world),
            }
            _keep(folder, trainer, place, world, metrics)
            report.epoch(metrics)
        if accuracy is None:
            accuracy = trainer.evaluate(data.test, recipe.training.batch)
        took = time.perf_counter() - started
    rows = [
        ("test accuracy", f"{accuracy:.2%}"),
        ("samples per second", f"{seen / took:,.0f}"),
        ("steps", f"{place.step}"),
        ("time", f"{took:.2f} s"),
    ]
    report.end(rows, _split(trainer, world))
    report.say(f"run: {folder}")
    report.say(f"test accuracy: {accuracy:.1%}")


def _load(recipe: Recipe, world: World) -> Dataset:
    for kind, name, known in (("data", recipe.data.name, DATA), ("model", recipe.model.name, MODELS)):
        if name not in known:
            raise RecipeError(f"{kind}.name = {name!r}; there are {', '.join(known)}")
    data = DATA[recipe.data.name]()
    batch = recipe.training.batch
    if batch > len(data.train):
        raise RecipeError(f"training.batch = {batch}, but {recipe.data.name} has {len(data.train)} samples to train on")
    if world.size > batch:
        raise RecipeError(f"{world.size} ranks share batches of {batch} samples, so some would have none")
    return data


def _make_trainer(recipe: Recipe, world: World, data: Dataset) -> Trainer:
    torch.manual_seed(recipe.training.seed)
    model = MODELS[recipe.model.name](data.classes).to(DTYPES[recipe.model.dtype])
    options = recipe.optimizer
    optimizer = torch.optim.SGD(
        model.parameters(), options.learning_rate, momentum=options.momentum, weight_decay=options.weight_decay
    )
    exchange = Exchange(recipe.exchange.algorithm, int(recipe.exchange.bucket_megabytes * (1 << 20)))
    return Trainer(model, optimizer, BSP(exchange), world)


def _train_epoch(
    recipe: Recipe, world: World, trainer: Trainer, data: Dataset, place: Place, folder: Path, report: Report
) -> None:
    """Make the steps of an epoch that are not done yet, changing `place` as they are."""
    training = recipe.training
    steps = steps_of(len(data.train), training.batch)
    order = permutation(len(data.train), training.seed, place.epoch)
    dtype = DTYPES[recipe.model.dtype]
    while place.done < steps:
        with trainer.recorder.record("loading"):
            rows = torch.from_numpy(share(order, training.batch, place.done, world.rank, world.size))
            inputs, labels = data.train.inputs[rows].to(dtype), data.train.labels[rows]
        torch.manual_seed(_seed_of_step(training.seed, place.step, world.rank))
        place.loss += trainer.step(inputs, labels)
        place.done += 1
        place.step += 1
        report.step(place.epoch, place.done, steps)
        if training.checkpoint_every and place.step % training.checkpoint_every == 0 and place.done < steps:
            _keep(folder, trainer, place, world)


def _seed_of_step(seed: int, step: int, rank: int) -> int:
    """What a step's random numbers (dropout) begin from: so that they need not be kept in checkpoints."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


def _agree(value: float, world: World) -> float:
    """The sum of a number over all ranks."""
    return float(world.allreduce(torch.tensor([value], dtype=torch.float64)))


def _split(trainer: Trainer, world: World) -> dict[str, float]:
    """Where the time went so far: seconds, mean over ranks."""
    seconds = torch.tensor(list(trainer.recorder.split().values()), dtype=torch.float64)
    return dict(zip(KINDS, (world.allreduce(seconds) / world.size).tolist(), strict=True))


def _keep(
    folder: Path, trainer: Trainer, place: Place, world: World, metrics: dict[str, Any] | None = None
) -> None:
    """Write a checkpoint, after the metrics of the epoch that it ends."""
    loss = _agree(place.loss, world)

    def write() -> None:
        if metrics is not None:
            run_directory.add_metrics(folder, metrics)
        progress = {"epoch": place.epoch, "done": place.done, "loss": loss}
        checkpoint = Checkpoint(place.step, trainer.model.state_dict(), trainer.optimizer.state_dict(), progress)
        save(folder / run_directory.CHECKPOINTS, checkpoint)

    world.on_root(write)


def _go_on(folder: Path, trainer: Trainer, world: World) -> tuple[Place, list[str]]:
    """Put the newest whole checkpoint into the model and the optimizer; where the run is then, and what to say."""

    def read() -> tuple[Checkpoint, list[str]]:
        checkpoint, torn = load_newest(folder / run_directory.CHECKPOINTS)
        run_directory.forget_after(folder, checkpoint.step)
        return checkpoint, torn

    checkpoint, torn = world.on_root(read)
    try:
        trainer.model.load_state_dict(checkpoint.weights)
        trainer.optimizer.load_state_dict(checkpoint.optimizer)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the checkpoint of step {checkpoint.step} does not fit the recipe's model: {reason}") from error
    progress = checkpoint.progress
    loss = progress["loss"] if world.rank == 0 else 0.0  # the sum of all ranks, so it counts once
    notes = [f"{line}; the one before it is used" for line in torn]
    return Place(progress["epoch"], progress["done"], checkpoint.step, loss), [*notes, f"goes on after step {checkpoint.step}"]
