"""Carries a recipe out on the ranks of a world: trains, tests, keeps checkpoints, says how it goes.

┌─ an epoch ──────────────────────────────────────────┐
│ load, step, load, step, ... (checkpoint) ... step   │ test ─ metrics ─ checkpoint
└─────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.data.feed import Feed, Hold, InMemory, Packed
from unisono.data.loading import Batch
from unisono.data.order import steps_of
from unisono.data.table import DATA
from unisono.errors import CheckpointError, RecipeError
from unisono.launch import cores
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

MOST_THREADS = 8
"""Threads that decode, unless the recipe says more."""

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
    data: str = ""
    """The mark of what it was trained on, where the run goes on."""


def train(recipe: Recipe, world: World, folder: Path | None, resume: Path | None, trace: Path | None = None) -> None:
    """Carry `recipe` out in `folder` (None: a new one under runs/), or go on with the run in `resume`.

    `trace` is a file for the timeline of what is done here.
    """
    check_run(recipe, world.size)
    if trace is not None:
        world.on_root(lambda: check_writable(trace))
    feed = _make_feed(recipe, world)
    timeline = None if trace is None else Timeline(world)
    trainer = _make_trainer(recipe, world, feed, timeline)
    place, notes = Place(), list[str]()
    if resume is not None:
        before = world.on_root(lambda: run_directory.recipe_of(resume, []))
        place, notes = _go_on(resume, trainer, world)
        _check_order(before, recipe, place, feed.mark)
        world.on_root(lambda: run_directory.write_recipe(resume, replace(recipe, ranks=world.size)))
    home = resume or world.on_root(lambda: run_directory.begin(replace(recipe, ranks=world.size), folder))
    with Report(world.rank == 0, recipe.training.epochs) as report:
        for note in notes:
            report.say(note)
        on = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
        report.say(f"{recipe.name}: {world.size} ranks on {on}, {feed.samples} samples, into {home}")
        trainer.gradients.say(report.say)
        _Run(recipe, world, feed, trainer, home, report, place).finish()
    feed.close()
    if timeline is not None and trace is not None:
        timeline.write(trace)


@dataclass
class _Run:
    recipe: Recipe
    world: World
    feed: Feed
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
        accuracy = self._test() if self.accuracy is None else self.accuracy
        seconds = time.perf_counter() - begun
        seen = (self.place.epoch - first.epoch) * self.feed.samples - first.done * batch
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
        training, samples, dtype = self.recipe.training, self.feed.samples, DTYPES[self.recipe.model.dtype]
        begun, skipped = time.perf_counter(), self.place.done * training.batch
        steps = steps_of(samples, training.batch)
        batches = self.feed.epoch(self.place.epoch, training.batch, self.place.done)
        while self.place.done < steps:
            with self.trainer.recorder.record("loading"):
                inputs, labels = next(batches)
                inputs = inputs.to(dtype)
            torch.manual_seed(_seed_of_step(training.seed, self.place.step, self.world.rank))
            loss = self.place.loss + self.trainer.step(inputs, labels)
            self.place = Place(self.place.epoch, self.place.done + 1, self.place.step + 1, loss)
            self.report.step(self.place.epoch, self.place.done, steps)
            every = training.checkpoint_every
            if every and self.place.step % every == 0 and self.place.done < steps:
                self._keep(self._agree(loss))
        self.trainer.wait()
        seconds = time.perf_counter() - begun
        loss = self._agree(self.place.loss) / samples
        self.accuracy = self._test()
        self.place = Place(self.place.epoch + 1, 0, self.place.step)
        metrics = {
            "epoch": self.place.epoch,
            "step": self.place.step,
            "loss": loss,
            "test_accuracy": self.accuracy,
            "samples_per_second": (samples - skipped) / seconds,
            "seconds": seconds,
            **self._split(),
        }
        self._keep(0.0, metrics)
        self._keep_steps()
        self.report.epoch(metrics)

    def _test(self) -> float:
        """The share of what is held out that the model gets right."""
        dtype = DTYPES[self.recipe.model.dtype]
        source = self.feed.held_out(self.recipe.training.batch)

        def batches() -> Iterator[Batch]:
            while True:
                with self.trainer.recorder.record("loading"):
                    found = next(source, None)
                if found is None:
                    return
                yield found[0].to(dtype), found[1]

        return self.trainer.evaluate(batches(), self.feed.tested)

    def _keep(self, loss: float, metrics: dict[str, Any] | None = None) -> None:
        """Write a checkpoint, after the metrics of the epoch it ends; `loss` is the sum of all ranks so far."""
        place, trainer, folder = self.place, self.trainer, self.folder
        trainer.wait()

        def write() -> None:
            if metrics is not None:
                run_directory.add_metrics(folder, metrics)
            progress = {"epoch": place.epoch, "done": place.done, "loss": loss, "data": self.feed.mark}
            progress["meeting"] = trainer.gradients.state()
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


def _make_feed(recipe: Recipe, world: World) -> Feed:
    data = recipe.data
    if not data.pack:
        return InMemory(DATA[data.name](), world, recipe.training.seed)
    threads = data.threads or min(MOST_THREADS, max(1, cores() // world.node_world.size))
    hold = Hold(Path(data.pack), data.hold == "whole", data.groups, data.size, data.augment, threads)
    return Packed(hold, world, recipe.training.seed)


def _make_trainer(recipe: Recipe, world: World, feed: Feed, timeline: Timeline | None) -> Trainer:
    torch.manual_seed(recipe.training.seed)
    model = MODELS[recipe.model.name](feed.classes, feed.colors).to(DTYPES[recipe.model.dtype])
    options = recipe.optimizer
    optimizer = torch.optim.SGD(
        model.parameters(), options.learning_rate, momentum=options.momentum, weight_decay=options.weight_decay
    )
    wire = None if recipe.exchange.wire == OWN else recipe.exchange.wire
    megabytes = recipe.exchange.bucket_megabytes
    largest = max(1, int(megabytes * (1 << 20))) if megabytes else None
    rule = BSP(Exchange(recipe.exchange.algorithm, wire, largest), recipe.exchange.embedding)
    return Trainer(model, optimizer, rule, world, clip=recipe.optimizer.clip or None, timeline=timeline)


def _check_order(before: Recipe, now: Recipe, place: Place, data: str) -> None:
    """Within an epoch the order of samples must stay, or some would be seen twice and others never."""
    if place.done and place.data != data:
        raise RecipeError(
            f"the run stopped {place.done} steps into an epoch of other data ({place.data}) than now ({data}); "
            "it can be changed at the end of an epoch alone"
        )
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
    place = Place(progress["epoch"], progress["done"], checkpoint.step, progress["loss"], progress["data"])
    if world.rank:  # the sum of all ranks counts once
        place = replace(place, loss=0.0)
    notes = [f"{line}; the one before it is used" for line in torn]
    return place, [*notes, f"goes on after step {checkpoint.step}"]
