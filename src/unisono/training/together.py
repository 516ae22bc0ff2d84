"""Player of a run whose ranks all train together: epochs in a fixed order, tests, metrics, checkpoints.

┌─ an epoch ─────────────────────────────────────────────────┐
│ load, rate, step, load, rate, step, ... (checkpoint) ...   │ test ─ metrics ─ checkpoint
└────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.data.loading import Batch
from unisono.data.order import steps_of
from unisono.reducer import requested_by
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy, LossSum
from unisono.training.checkpoint.layout import Checkpoint
from unisono.training.events import Draw, RunPoint, Save, TrainStep, fixed_order
from unisono.training.foresight import RunForesight
from unisono.training.learning_rate import rate_of_step
from unisono.training.player import EventPlayer, Run, Timer
from unisono.training.recipe import Recipe
from unisono.training.recorder import KINDS
from unisono.training.signals import STOPPED, SignalHandlers
from unisono.training.state import check_change, discard_newer, resume_run, states_of


class TogetherPlayer(EventPlayer):
    """Player on a rank that has the same events as all others, at the same time."""

    def __init__(self, run: Run, machine: str | None, ledger: Path | None) -> None:
        """Make the player; `machine` predicts the run before its first step, `ledger` is that of `RunForesight`."""
        super().__init__(run)
        self._machine, self._ledger = machine, ledger
        self._first = RunPoint()  # where the run begins
        self.made = 0
        """Steps made."""
        self._foresight: RunForesight
        self._drawn, self._epoch_began = Draw(0, 0), 0.0
        self._timer = Timer(60 * run.recipe.training.checkpoint_minutes)
        self._due = False  # True where the clock has requested the checkpoint of this step

    def begin(self, before: Recipe | None) -> None:
        """Load the newest checkpoint of a run that is resumed, whose recipe was `before`; None for a new run."""
        run = self.run
        if before is None:
            return
        point, damaged, notes = resume_run(run.home, run.trainer, run.world)
        check_change(before, run.recipe, point, run.feed.fingerprint)
        self._first, self.losses, self.made = point, LossSum(point.loss), point.step
        run.began -= point.seconds
        notes += run.world.call_on_root(lambda: discard_newer(run.home, point.step, damaged))
        begins = f"{run.home} has no checkpoint yet: the run begins again"
        run.notes[:0] = [*notes, f"resumes after step {point.step}" if point.step else begins]

    def train(self) -> int:
        """Make the epochs that are left. Return the exit code."""
        run = self.run
        with run.display:
            for note in run.notes:
                run.display.log(note)
            run.trainer.reducer.programs.log_with(run.display.log, run.display.detail)
            self._foresight = RunForesight(run, self._ledger)
            self._foresight.begin(self._machine, self.made)
            self._timer.restart()
            with SignalHandlers(
                run.trainer.request, lambda: run.end_at_once(f", after step {self.made}"), run.warn
            ) as self.signals:
                code = self._finish()
        run.feed.close()
        return code

    def _finish(self) -> int:
        """Make the epochs that are left and report the results. Return the exit code."""
        run, began, first = self.run, time.perf_counter(), self._first
        samples, training = run.feed.samples, run.recipe.training
        requests = run.trainer.requests
        stop = self.play(fixed_order(run.recipe, samples, run.world.rank, first, requests, self._stopping))
        if stop is not None:
            run.display.log(f"saved step {self.made} on {stop.why}; resume with: unisono train --resume {run.home}")
            return STOPPED
        accuracy = self._test() if self.accuracy is None else self.accuracy
        seconds = time.perf_counter() - began
        seen = max(0, training.epochs - first.epoch) * samples
        found = run.results(accuracy, seen - min(first.done * training.batch, seen), seconds)
        run.report(found, [("steps", f"{self.made}"), ("time", f"{seconds:.2f} s")], self._seconds_by_kind())
        self._foresight.finish(run.elapsed)
        run.report_last(found)
        return 0

    def draw(self, event: Draw) -> Iterator[Batch]:
        """Return this rank's share of the rest of an epoch."""
        self._drawn, self._epoch_began = event, time.perf_counter()
        return self.feed.epoch(event.epoch, self.run.recipe.training.batch, event.done)

    def step(self, event: TrainStep) -> int:
        """Train on this rank's share of the next batch."""
        self._due = self.run.world.rank == 0 and self._timer.due()
        if self._due:
            self.run.trainer.request("save")
        samples = super().step(event)
        self.made = event.number + 1
        steps = steps_of(self.run.feed.samples, self.run.recipe.training.batch)
        self.run.display.step(self._drawn.epoch, event.done + 1, steps, self.losses.last)
        self._foresight.after_step(self.made)
        return samples

    def checkpoint(self, event: Save) -> Checkpoint:
        """Return the state of all ranks."""
        run = self.run
        loss = 0.0 if event.tests else self._sum_of_ranks(self.losses.total)
        weights, optimizer = states_of(run.trainer, run.world)
        reached = replace(event.point, loss=loss, seconds=run.elapsed, data=run.feed.fingerprint)
        progress = {**asdict(reached), "reducer": run.trainer.reducer.programs.tuning.state()}
        return Checkpoint(reached.step, weights, optimizer, progress)

    def report_saved(self, event: Save) -> None:
        """Write the times of an epoch's steps, or log a checkpoint that a signal has requested."""
        self._timer.restart()
        if event.tests:
            self._write_steps(event.point.epoch)
        elif event.why and not self._due:
            self.run.display.log(f"saved step {self.made} on {event.why}")

    def end_epoch(self) -> dict[str, Any]:
        """Test the weights. Return the metrics of the epoch."""
        run, training, samples = self.run, self.run.recipe.training, self.run.feed.samples
        self._batches = iter(())
        seconds, steps = time.perf_counter() - self._epoch_began, steps_of(samples, training.batch)
        loss, self.losses = self._sum_of_ranks(self.losses.total) / samples, LossSum()
        epoch, skipped = self._drawn.epoch, min(self._drawn.done * training.batch, samples)
        self.accuracy = self._test()
        return {
            "epoch": epoch + 1,
            "step": self.made,
            "learning_rate": rate_of_step(
                run.recipe.optimizer, epoch, steps - 1, steps, training.epochs, training.batch
            ),
            "loss": loss,
            **run.results(self.accuracy, samples - skipped, seconds),
            "seconds": seconds,
            "elapsed": run.elapsed,
            **self._seconds_by_kind(),
        }

    def _test(self) -> Accuracy:
        """Return the test accuracy of the model."""
        feed = self.feed
        batches = self.run.awaited(feed.test_batches(self.run.recipe.training.batch))
        return self.run.trainer.evaluate(batches, feed.test_samples * feed.labels_per_sample)

    def _stopping(self) -> str:
        """Return the ranks that have received SIGTERM, in words; empty where none has."""
        stops = self.signals is not None and self.signals.stop
        count = self._sum_of_ranks(float(stops))
        return requested_by(count, self._sum_of_ranks(float(stops) * self.run.world.rank)) if count else ""

    def _write_steps(self, epoch: int) -> None:
        """Write the times of the epoch's steps, of every rank."""
        run = self.run
        everyone = np.stack(run.world.all_gather_object(run.trainer.recorder.take_steps()))
        run.world.call_on_root(lambda: run_directory.write_steps(run.home, epoch, everyone, KINDS))
        if run.world.rank == 0:
            self._foresight.add_steps(everyone)

    def _sum_of_ranks(self, value: float) -> float:
        """Return the sum of a number over all ranks, of which each has it for its own samples."""
        return float(self.run.world.allreduce(torch.tensor([value], dtype=torch.float64)))

    def _seconds_by_kind(self) -> dict[str, float]:
        """Return the seconds of each kind so far, mean over ranks."""
        seconds = torch.tensor(list(self.run.trainer.recorder.split().values()), dtype=torch.float64)
        return dict(zip(KINDS, (self.run.world.allreduce(seconds) / self.run.world.size).tolist(), strict=True))
