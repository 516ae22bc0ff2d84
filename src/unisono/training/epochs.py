"""The epochs of a run: steps, tests, metrics, and checkpoints when they are due or requested.

┌─ an epoch ─────────────────────────────────────────────────┐
│ load, rate, step, load, rate, step, ... (checkpoint) ...   │ test ─ metrics ─ checkpoint
└────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.data.feed import Feed
from unisono.data.loading import Batch
from unisono.data.order import steps_of
from unisono.reducer import asked_by
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy
from unisono.training.checkpoint import Checkpoint, save
from unisono.training.learning_rate import rate_of_step
from unisono.training.making import DTYPES
from unisono.training.progress import Report
from unisono.training.rank_states import states_of
from unisono.training.recipe import Recipe
from unisono.training.recorder import KINDS
from unisono.training.resuming import Place
from unisono.training.signals import STOPPED, Signals
from unisono.training.trainer import Trainer
from unisono.world import World


@dataclass
class Epochs:
    """The rest of a run, made on all ranks together."""

    recipe: Recipe
    world: World
    feed: Feed
    trainer: Trainer
    folder: Path
    report: Report
    place: Place
    begun: float
    """Start of the run on `time.perf_counter`, as if the run had never stopped."""
    accuracy: Accuracy | None = None
    """Test accuracy after the last epoch made here; None before."""
    signals: Signals | None = None
    saved: float = field(default_factory=time.perf_counter)
    """Time of the last checkpoint, on `time.perf_counter`."""

    def finish(self) -> int:
        """Make the epochs that are left and report the results. Return the exit code."""
        begun = time.perf_counter()
        first, batch = self.place, self.recipe.training.batch
        while self.place.epoch < self.recipe.training.epochs:
            if self._epoch():
                return STOPPED
        accuracy = self._test() if self.accuracy is None else self.accuracy
        seconds = time.perf_counter() - begun
        seen = (self.place.epoch - first.epoch) * self.feed.samples
        seen -= min(first.done * batch, seen)
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
        return 0

    def end(self) -> None:
        """End all ranks at once, after a second SIGTERM."""
        words = f"unisono: rank {self.world.rank}: a second SIGTERM: ended at once, after step {self.place.step}\n"
        self.world.abort(STOPPED, words)

    def warn(self, line: str) -> None:
        """Print a warning about a step that takes long after a signal, on the rank that got the signal."""
        print(f"unisono: rank {self.world.rank}: {line}", file=sys.stderr, flush=True)

    def _epoch(self) -> bool:
        """Make the remaining steps of an epoch, then test, metrics, checkpoint. Return True where the run is to end."""
        training, samples = self.recipe.training, self.feed.samples
        begun, skipped = time.perf_counter(), min(self.place.done * training.batch, samples)
        if self._steps():
            return True
        seconds = time.perf_counter() - begun
        loss = self._agree(self.place.loss) / samples
        rate = self._rate(self.place.epoch, steps_of(samples, training.batch) - 1)
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
        ended = self.signals is not None and self.signals.stop and self.place.epoch < training.epochs
        count = self._agree(float(ended))  # SIGTERM after the last step's control word
        if not count:
            return False
        who = asked_by(count, self._agree(float(ended) * self.world.rank))
        self._say_saved(f"SIGTERM to {who}", ends=True)
        return True

    def _steps(self) -> bool:
        """Make the remaining steps of an epoch. Return True where the run is to end; it is saved then."""
        training, dtype = self.recipe.training, DTYPES[self.recipe.model.dtype]
        steps = steps_of(self.feed.samples, training.batch)
        batches = self.feed.epoch(self.place.epoch, training.batch, self.place.done)
        while self.place.done < steps:
            with self.trainer.recorder.record("loading"):
                inputs, labels = next(batches)
                inputs = inputs.to(dtype)
            epoch, done, step = self.place.epoch, self.place.done, self.place.step
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = self._rate(epoch, done)
            torch.manual_seed(_seed_of_step(training.seed, step, self.world.rank))
            due = self._ask_in_time()
            loss = self.place.loss + self.trainer.step(inputs, labels)
            self.place = Place(epoch, done + 1, step + 1, loss)
            self.report.step(epoch, done + 1, steps)
            asked, every = self.trainer.requests(), training.checkpoint_every
            if "stop" in asked:
                self._keep(self._agree(loss))
                self._say_saved(f"SIGTERM to {asked['stop']}", ends=True)
                return True
            if done + 1 < steps and ("save" in asked or (every and self.place.step % every == 0)):
                self._keep(self._agree(loss))
                if "save" in asked and not due:
                    self._say_saved(f"SIGUSR1 to {asked['save']}", ends=False)
        self.trainer.wait()
        return False

    def _rate(self, epoch: int, done: int) -> float:
        """Return the learning rate of the step that follows `done` steps of an epoch."""
        training = self.recipe.training
        steps = steps_of(self.feed.samples, training.batch)
        return rate_of_step(self.recipe.optimizer, epoch, done, steps, training.epochs, training.batch)

    def _ask_in_time(self) -> bool:
        """Request a checkpoint with the next step where rank 0's clock says it is due. Return True if requested."""
        minutes = self.recipe.training.checkpoint_minutes
        if not minutes or self.world.rank != 0 or time.perf_counter() - self.saved < 60 * minutes:
            return False
        self.trainer.request("save")
        return True

    def _say_saved(self, why: str, ends: bool) -> None:
        """Report the checkpoint that a signal to any rank has caused."""
        goes_on = f"; go on with: unisono train --resume {self.folder}" if ends else ""
        self.report.say(f"saved step {self.place.step} on {why}{goes_on}")

    def _test(self) -> Accuracy:
        """Return the test accuracy of the model."""
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
        """Write a checkpoint, after the metrics of the epoch that it ends; `loss` is the sum over all ranks so far."""
        place, trainer, folder = self.place, self.trainer, self.folder
        trainer.wait()
        weights, optimizer = states_of(trainer, self.world)

        def write() -> None:
            if metrics is not None:
                run_directory.add_metrics(folder, metrics)
            progress = {"epoch": place.epoch, "done": place.done, "loss": loss, "data": self.feed.mark}
            progress |= {"seconds": time.perf_counter() - self.begun, "meeting": trainer.reducer.state()}
            save(folder / run_directory.CHECKPOINTS, Checkpoint(place.step, weights, optimizer, progress))

        self.world.call_on_root(write)
        self.saved = time.perf_counter()
        if self.signals is not None:
            self.signals.answered()

    def _keep_steps(self) -> None:
        """Write the times of the epoch's steps, of every rank."""
        everyone = self.world.all_gather_object(self.trainer.recorder.take_steps())
        self.world.call_on_root(
            lambda: run_directory.keep_steps(self.folder, self.place.epoch, np.stack(everyone), KINDS)
        )

    def _agree(self, value: float) -> float:
        """Return the sum of a number over all ranks."""
        return float(self.world.allreduce(torch.tensor([value], dtype=torch.float64)))

    def _split(self) -> dict[str, float]:
        """Return the seconds of each kind so far, mean over ranks."""
        seconds = torch.tensor(list(self.trainer.recorder.split().values()), dtype=torch.float64)
        return dict(zip(KINDS, (self.world.allreduce(seconds) / self.world.size).tolist(), strict=True))


def _seed_of_step(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step's random numbers (dropout), so that checkpoints need not keep their state."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)
