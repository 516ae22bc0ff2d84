"""Carries a recipe out on the ranks of a world: trains, tests, keeps checkpoints, says how it goes.

┌─ an epoch ──────────────────────────────────────────┐
│ load, step, load, step, ... (checkpoint) ... step   │ test ─ metrics ─ checkpoint
└─────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.data.dataset import Dataset
from unisono.data.order import permutation, share, steps_of
from unisono.data.table import DATA
from unisono.errors import CheckpointError, RecipeError
from unisono.models.table import MODELS
from unisono.rules import BSP, Exchange
from unisono.training import run_directory
from unisono.training.checkpoint import Checkpoint, forget_newer, load_newest, save
from unisono.training.progress import Report
from unisono.training.recipe import OWN, Recipe, check_run
from unisono.training.recorder import KINDS
from unisono.training.timeline import Timeline, check_writable
from unisono.training.trainer import Trainer
from unisono.world import World

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Place:
    """How far a run has come: `step` steps in all, `done` of them in `epoch`.

    `loss` is what this rank's samples of the epoch sum to so far.
    """

    epoch: int = 0
    done: int = 0
    step: int = 0
    loss: float = 0.0


def train(recipe: Recipe, world: World, folder: Path | None, resume: Path | None, trace: Path | None = None) -> None:
    """Carry `recipe` out in `folder` (None: a new one under runs/), or go on with the run in `resume`.

    `trace` is a file for the timeline of what is done here.
    """
    check_run(recipe, world.size)
    if trace is not None:
        world.on_root(lambda: check_writable(trace))
    data = DATA[recipe.data.name]()
    timeline = None if trace is None else Timeline(world)
    trainer = _make_trainer(recipe, world, data, timeline)
    place, notes = Place(), list[str]()
    if resume is not None:
        before = world.on_root(lambda: run_directory.recipe_of(resume, []))
        place, notes = _go_on(resume, trainer, world)
        _check_order(before, recipe, place)
        world.on_root(lambda: run_directory.write_recipe(resume, replace(recipe, ranks=world.size)))
    home = resume or world.on_root(lambda: run_directory.begin(replace(recipe, ranks=world.size), folder))
    with Report(world.rank == 0, recipe.training.epochs) as report:
        for note in notes:
            report.say(note)
        on = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
        report.say(f"{recipe.name}: {world.size} ranks on {on}, {len(data.train)} samples, into {home}")
        trainer.gradients.say(report.say)
        _Run(recipe, world, data, trainer, home, report, place).finish()
    if timeline is not None and trace is not None:
        timeline.write(trace)


@dataclass
class _Run:
    recipe: Recipe
    world: World
    data: Dataset
    trainer: Trainer
    folder: Path
    report: Report
    place: Place
    accuracy: float | None = None
    """What the last epoch made here reached on the test set."""

    def finish(self) -> None:
        """Make the epochs that are not done, and say what came of it."""
        begun = time.perf_counter()
        first, batch = self.place, self.recipe.training.batch
        while self.place.epoch < self.recipe.training.epochs:
            self._epoch()
        accuracy = self.trainer.evaluate(self.data.test, batch) if self.accuracy is None else self.accuracy
        seconds = time.perf_counter() - begun
        seen = (self.place.epoch - first.epoch) * len(self.data.train) - first.done * batch
        rows = [
            ("test accuracy", f"{accuracy:.2%}"),
            ("samples per second", f"{seen / seconds:,.0f}"),
            ("steps", f"{self.place.step}"),
            ("time", f"{seconds:.2f} s"),
        ]
        self.report.end(rows, self._split())
        self.report.say(f"run: {self.folder}")
        self.report.say(f"test accuracy: {accuracy:.1%}")

    def _epoch(self) -> None:
        """The steps of an epoch that are not done yet, then test, metrics, checkpoint."""
        training, train = self.recipe.training, self.data.train
        begun, skipped = time.perf_counter(), self.place.done * training.batch
        steps = steps_of(len(train), training.batch)
        order = permutation(len(train), training.seed, self.place.epoch)
        while self.place.done < steps:
            with self.trainer.recorder.record("loading"):
                rows = torch.from_numpy(share(order, training.batch, self.place.done, self.world.rank, self.world.size))
                inputs, labels = train.inputs[rows].to(DTYPES[self.recipe.model.dtype]), train.labels[rows]
            torch.manual_seed(_seed_of_step(training.seed, self.place.step, self.world.rank))
            loss = self.place.loss + self.trainer.step(inputs, labels)
            self.place = Place(self.place.epoch, self.place.done + 1, self.place.step + 1, loss)
            self.report.step(self.place.epoch, self.place.done, steps)
            every = training.checkpoint_every
            if every and self.place.step % every == 0 and self.place.done < steps:
                self._keep(self._agree(loss))
        self.trainer.wait()
        seconds = time.perf_counter() - begun
        loss = self._agree(self.place.loss) / len(train)
        self.accuracy = self.trainer.evaluate(self.data.test, training.batch)
        self.place = Place(self.place.epoch + 1, 0, self.place.step)
        metrics = {
            "epoch": self.place.epoch,
            "step": self.place.step,
            "loss": loss,
            "test_accuracy": self.accuracy,
            "samples_per_second": (len(train) - skipped) / seconds,
            "seconds": seconds,
            **self._split(),
        }
        self._keep(0.0, metrics)
        self._keep_steps()
        self.report.epoch(metrics)

    def _keep(self, loss: float, metrics: dict[str, Any] | None = None) -> None:
        """Write a checkpoint, after the metrics of the epoch it ends; `loss` is the sum of all ranks so far."""
        place, trainer, folder = self.place, self.trainer, self.folder
        trainer.wait()

        def write() -> None:
            if metrics is not None:
                run_directory.add_metrics(folder, metrics)
            progress = {"epoch": place.epoch, "done": place.done, "loss": loss, "meeting": trainer.gradients.state()}
            state = trainer.model.state_dict(), trainer.optimizer.state_dict()
            save(folder / run_directory.CHECKPOINTS, Checkpoint(place.step, *state, progress))

        self.world.on_root(write)

    def _keep_steps(self) -> None:
        """Write what the steps of the epoch took, on every rank."""
        everyone = self.world.gather(self.trainer.recorder.take_steps())
        self.world.on_root(lambda: run_directory.keep_steps(self.folder, self.place.epoch, np.stack(everyone), KINDS))

    def _agree(self, value: float) -> float:
        """The sum of a number over all ranks."""
        return float(self.world.allreduce(torch.tensor([value], dtype=torch.float64)))

    def _split(self) -> dict[str, float]:
        """Where the time went so far: seconds, mean over ranks."""
        seconds = torch.tensor(list(self.trainer.recorder.split().values()), dtype=torch.float64)
        return dict(zip(KINDS, (self.world.allreduce(seconds) / self.world.size).tolist(), strict=True))


def _make_trainer(recipe: Recipe, world: World, data: Dataset, timeline: Timeline | None) -> Trainer:
    torch.manual_seed(recipe.training.seed)
    model = MODELS[recipe.model.name](data.classes).to(DTYPES[recipe.model.dtype])
    options = recipe.optimizer
    optimizer = torch.optim.SGD(
        model.parameters(), options.learning_rate, momentum=options.momentum, weight_decay=options.weight_decay
    )
    wire = None if recipe.exchange.wire == OWN else recipe.exchange.wire
    megabytes = recipe.exchange.bucket_megabytes
    largest = max(1, int(megabytes * (1 << 20))) if megabytes else None
    rule = BSP(Exchange(recipe.exchange.algorithm, wire, largest), recipe.exchange.embedding)
    return Trainer(model, optimizer, rule, world, clip=recipe.optimizer.clip or None, timeline=timeline)


def _check_order(before: Recipe, now: Recipe, place: Place) -> None:
    """Within an epoch the order of samples must stay, or some would be seen twice and others never."""
    for key in ("batch", "seed"):
        old, new = getattr(before.training, key), getattr(now.training, key)
        if place.done and old != new:
            raise RecipeError(
                f"training.{key} = {new}, but the run stopped {place.done} steps into an epoch with {old}; "
                "it can be changed at the end of an epoch alone"
            )


def _seed_of_step(seed: int, step: int, rank: int) -> int:
    """What a step's random numbers (dropout) begin from: so that they need not be kept in checkpoints."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


def _go_on(folder: Path, trainer: Trainer, world: World) -> tuple[Place, list[str]]:
    """Put the newest whole checkpoint into the model and the optimizer; where the run is then, and what to say."""

    def read() -> tuple[Checkpoint, list[str]]:
        checkpoint, torn = load_newest(folder / run_directory.CHECKPOINTS)
        forget_newer(folder / run_directory.CHECKPOINTS, checkpoint.step)
        run_directory.forget_after(folder, checkpoint.step)
        return checkpoint, torn

    checkpoint, torn = world.on_root(read)
    try:
        trainer.model.load_state_dict(checkpoint.weights)
        options = [{**group, "params": []} for group in trainer.optimizer.param_groups]
        trainer.optimizer.load_state_dict(checkpoint.optimizer)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"step {checkpoint.step}'s checkpoint does not fit the recipe's model: {reason}"
        ) from error
    for group, option in zip(trainer.optimizer.param_groups, options, strict=True):  # the recipe's, which may be new
        group.update({key: value for key, value in option.items() if key != "params"})
    progress = checkpoint.progress
    trainer.gradients.restore(progress["meeting"])
    place = Place(progress["epoch"], progress["done"], checkpoint.step, progress["loss"])
    if world.rank:  # the sum of all ranks counts once
        place = replace(place, loss=0.0)
    notes = [f"{line}; the one before it is used" for line in torn]
    return place, [*notes, f"goes on after step {checkpoint.step}"]
