"""Carries a recipe out on the ranks of a world: trains, tests, keeps checkpoints, says how it goes.

┌─ an epoch ─────────────────────────────────────────────────┐
│ load, rate, step, load, rate, step, ... (checkpoint) ...   │ test ─ metrics ─ checkpoint
└────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.data.feed import Feed
from unisono.data.loading import Batch
from unisono.data.order import steps_of
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy
from unisono.training.checkpoint import Checkpoint, save
from unisono.training.learning_rate import rate_of_step
from unisono.training.making import DTYPES, keep_plan, known_plan, make_feed, make_trainer, say_format, take_cores
from unisono.training.progress import Report
from unisono.training.recipe import Recipe, check_run
from unisono.training.recorder import KINDS
from unisono.training.resuming import Place, check_change, go_on
from unisono.training.timeline import Timeline, check_writable
from unisono.training.trainer import Trainer
from unisono.world import World


def train(recipe: Recipe, world: World, folder: Path | None, resume: Path | None, trace: Path | None = None) -> None:
    """Carry `recipe` out in `folder` (None: a new one under runs/), or go on with the run in `resume`.

    `trace` is a file for the timeline of what is done here.
    """
    begun = time.perf_counter()
    check_run(recipe, world.size)
    if trace is not None:
        world.on_root(lambda: check_writable(trace))
    share, said = take_cores(world)
    said.append(say_format(recipe, world))
    feed = make_feed(recipe, world, share)
    timeline = None if trace is None else Timeline(world)
    plan = known_plan(recipe, None if resume is None else resume / run_directory.CONVOLUTIONS, world)
    trainer = make_trainer(recipe, world, feed, timeline, plan)
    place, notes = Place(), list[str]()
    if resume is not None:
        before = world.on_root(lambda: run_directory.recipe_of(resume, []))
        place, notes = go_on(resume, trainer, world)
        check_change(before, recipe, place, feed.mark)
        world.on_root(lambda: run_directory.write_recipe(resume, replace(recipe, ranks=world.size)))
    home = resume or world.on_root(lambda: run_directory.begin(replace(recipe, ranks=world.size), folder))
    keep_plan(recipe, home / run_directory.CONVOLUTIONS, plan, world)
    with Report(world.rank == 0, recipe.training.epochs) as report:
        for note in notes:
            report.say(note)
        on = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
        report.say(f"{recipe.name}: {world.size} ranks on {on}, {feed.samples} samples, into {home}")
        for line in said:
            report.say(line)
        trainer.gradients.say(report.say)
        _Run(recipe, world, feed, trainer, home, report, place, begun - place.seconds).finish()
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
    begun: float
    """On this clock, as if the run had never stopped."""
    accuracy: Accuracy | None = None
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
            ("test accuracy", f"{accuracy.top1:.2%}"),
            *([] if accuracy.top5 is None else [("test accuracy, top-5", f"{accuracy.top5:.2%}")]),
            ("samples per second", f"{seen / seconds:,.0f}"),
            ("steps", f"{self.place.step}"),
            ("time", f"{seconds:.2f} s"),
        ]
        self.report.end(rows, self._split())
        self.report.say(f"run: {self.folder}")
        self.report.say(f"test accuracy: {accuracy.top1:.1%}")

    def _epoch(self) -> None:
        """The steps of an epoch that are not done yet, then test, metrics, checkpoint."""
        training, samples = self.recipe.training, self.feed.samples
        begun, skipped = time.perf_counter(), self.place.done * training.batch
        rate = self._steps()
        seconds = time.perf_counter() - begun
        loss = self._agree(self.place.loss) / samples
        self.accuracy = self._test()
        self.place = Place(self.place.epoch + 1, 0, self.place.step)
        metrics = {
            "epoch": self.place.epoch,
            "step": self.place.step,
            "learning_rate": rate,
            "loss": loss,
            "test_accuracy": self.accuracy.top1,
            **({} if self.accuracy.top5 is None else {"test_top5": self.accuracy.top5}),
            "samples_per_second": (samples - skipped) / seconds,
            "seconds": seconds,
            "elapsed": time.perf_counter() - self.begun,
            **self._split(),
        }
        self._keep(0.0, metrics)
        self._keep_steps()
        self.report.epoch(metrics)

    def _steps(self) -> float:
        """Make the steps of an epoch that are not done yet; the learning rate of the last one."""
        training, dtype = self.recipe.training, DTYPES[self.recipe.model.dtype]
        steps, rate = steps_of(self.feed.samples, training.batch), 0.0
        batches = self.feed.epoch(self.place.epoch, training.batch, self.place.done)
        while self.place.done < steps:
            with self.trainer.recorder.record("loading"):
                inputs, labels = next(batches)
                inputs = inputs.to(dtype)
            epoch, done, step = self.place.epoch, self.place.done, self.place.step
            rate = rate_of_step(self.recipe.optimizer, epoch, done, steps, training.epochs, training.batch)
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = rate
            torch.manual_seed(_seed_of_step(training.seed, step, self.world.rank))
            loss = self.place.loss + self.trainer.step(inputs, labels)
            self.place = Place(epoch, done + 1, step + 1, loss)
            self.report.step(epoch, done + 1, steps)
            every = training.checkpoint_every
            if every and self.place.step % every == 0 and self.place.done < steps:
                self._keep(self._agree(loss))
        self.trainer.wait()
        return rate

    def _test(self) -> Accuracy:
        """How much of what is held out the model gets right."""
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
            progress |= {"seconds": time.perf_counter() - self.begun, "meeting": trainer.gradients.state()}
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


def _seed_of_step(seed: int, step: int, rank: int) -> int:
    """What a step's random numbers (dropout) begin from: so that they need not be kept in checkpoints."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)
