"""The epochs of a run: steps, tests, metrics, and checkpoints when they are due or requested.

┌─ an epoch ─────────────────────────────────────────────────┐
│ load, rate, step, load, rate, step, ... (checkpoint) ...   │ test ─ metrics ─ checkpoint
└────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.data.feed import Feed
from unisono.data.order import steps_of
from unisono.reducer import requested_by
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.model import seed_dropout, split_of
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy
from unisono.training.build import DTYPES
from unisono.training.checkpoint import Checkpoint, save
from unisono.training.foresight import RunForesight
from unisono.training.learning_rate import rate_of_step
from unisono.training.progress import ProgressDisplay
from unisono.training.rank_states import states_of
from unisono.training.recipe import Recipe
from unisono.training.recorder import KINDS
from unisono.training.results import last_line, result_metrics, result_rows
from unisono.training.resume import ResumePoint
from unisono.training.seeds import seed_of_step
from unisono.training.signals import STOPPED, SignalHandlers
from unisono.training.trainer import Trainer
from unisono.world import World


@dataclass
class TrainingLoop:
    """The rest of a run, made on all ranks together."""

    recipe: Recipe
    world: World
    feed: Feed
    trainer: Trainer
    folder: Path
    display: ProgressDisplay
    point: ResumePoint
    begun: float
    """Start of the run on `time.perf_counter`, as if the run had never stopped."""
    foresight: RunForesight
    accuracy: Accuracy | None = None
    """Test accuracy after the last epoch made here; None before."""
    signals: SignalHandlers | None = None
    saved: float = field(default_factory=time.perf_counter)
    """Time of the last checkpoint, on `time.perf_counter`."""

    def finish(self) -> int:
        """Make the epochs that are left and report the results. Return the exit code."""
        begun = time.perf_counter()
        first, batch = self.point, self.recipe.training.batch
        while self.point.epoch < self.recipe.training.epochs:
            if self._epoch():
                return STOPPED
        accuracy = self._test() if self.accuracy is None else self.accuracy
        seconds = time.perf_counter() - begun
        seen = (self.point.epoch - first.epoch) * self.feed.samples
        seen -= min(first.done * batch, seen)
        found = result_metrics(accuracy, seen / seconds, self.feed.labels_per_sample)
        rows = [
            *result_rows(found),
            ("steps", f"{self.point.step}"),
            ("time", f"{seconds:.2f} s"),
        ]
        self.display.end(rows, self._seconds_by_kind())
        self.foresight.finish(time.perf_counter() - self.begun)
        self.display.log(f"run: {self.folder}")
        self.display.log(last_line(found))
        return 0

    def end(self) -> None:
        """End all ranks at once, after a second SIGTERM."""
        words = f"unisono: rank {self.world.rank}: a second SIGTERM: ended at once, after step {self.point.step}\n"
        self.world.abort(STOPPED, words)

    def warn(self, line: str) -> None:
        """Print a warning about a step that takes long after a signal, on the rank that got the signal."""
        print(f"unisono: rank {self.world.rank}: {line}", file=sys.stderr, flush=True)

    def _epoch(self) -> bool:
        """Make the remaining steps of an epoch, then test, metrics, checkpoint. Return True where the run is to end."""
        training, samples = self.recipe.training, self.feed.samples
        begun, skipped = time.perf_counter(), min(self.point.done * training.batch, samples)
        if self._steps():
            return True
        seconds = time.perf_counter() - begun
        loss = self._sum_of_ranks(self.point.loss) / samples
        rate = self._rate(self.point.epoch, steps_of(samples, training.batch) - 1)
        self.accuracy = self._test()
        self.point = ResumePoint(self.point.epoch + 1, 0, self.point.step)
        metrics = {
            "epoch": self.point.epoch,
            "step": self.point.step,
            "learning_rate": rate,
            "loss": loss,
            **result_metrics(self.accuracy, (samples - skipped) / seconds, self.feed.labels_per_sample),
            "seconds": seconds,
            "elapsed": time.perf_counter() - self.begun,
            **self._seconds_by_kind(),
        }
        self._save_checkpoint(0.0, metrics)
        self._write_steps()
        self.display.epoch(metrics)
        ended = self.signals is not None and self.signals.stop and self.point.epoch < training.epochs
        count = self._sum_of_ranks(float(ended))  # SIGTERM after the last step's control message
        if not count:
            return False
        who = requested_by(count, self._sum_of_ranks(float(ended) * self.world.rank))
        self._log_saved(f"SIGTERM to {who}", ends=True)
        return True

    def _steps(self) -> bool:
        """Make the remaining steps of an epoch. Return True where the run is to end; it is saved then."""
        training, dtype = self.recipe.training, DTYPES[self.recipe.model.dtype]
        steps = steps_of(self.feed.samples, training.batch)
        batches = self.trainer.awaited(self.feed.epoch(self.point.epoch, training.batch, self.point.done), dtype)
        while self.point.done < steps:
            inputs, labels = next(batches)
            epoch, done, step = self.point.epoch, self.point.done, self.point.step
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = self._rate(epoch, done)
            self._seed(done, step)
            due = self._request_if_due()
            lost = self.trainer.step(inputs, labels)
            loss = self.point.loss + lost
            self.point = ResumePoint(epoch, done + 1, step + 1, loss)
            self.display.step(epoch, done + 1, steps, lost / len(labels) if len(labels) else None)
            self.foresight.after_step(step + 1)
            requests, every = self.trainer.requests(), training.checkpoint_every
            if "stop" in requests:
                self._save_checkpoint(self._sum_of_ranks(loss))
                self._log_saved(f"SIGTERM to {requests['stop']}", ends=True)
                return True
            if done + 1 < steps and ("save" in requests or (every and self.point.step % every == 0)):
                self._save_checkpoint(self._sum_of_ranks(loss))
                if "save" in requests and not due:
                    self._log_saved(f"SIGUSR1 to {requests['save']}", ends=False)
        self.trainer.wait()
        return False

    def _rate(self, epoch: int, done: int) -> float:
        """Return the learning rate of the step that follows `done` steps of an epoch."""
        training = self.recipe.training
        steps = steps_of(self.feed.samples, training.batch)
        return rate_of_step(self.recipe.optimizer, epoch, done, steps, training.epochs, training.batch)

    def _request_if_due(self) -> bool:
        """Request a checkpoint with the next step where rank 0's clock says it is due. Return True if requested."""
        minutes = self.recipe.training.checkpoint_minutes
        if not minutes or self.world.rank != 0 or time.perf_counter() - self.saved < 60 * minutes:
            return False
        self.trainer.request("save")
        return True

    def _log_saved(self, why: str, ends: bool) -> None:
        """Log the checkpoint that a signal to any rank has caused."""
        resume = f"; resume with: unisono train --resume {self.folder}" if ends else ""
        self.display.log(f"saved step {self.point.step} on {why}{resume}")

    def _test(self) -> Accuracy:
        """Return the test accuracy of the model."""
        source = self.feed.test_batches(self.recipe.training.batch)
        batches = self.trainer.awaited(source, DTYPES[self.recipe.model.dtype])
        return self.trainer.evaluate(batches, self.feed.test_samples * self.feed.labels_per_sample)

    def _save_checkpoint(self, loss: float, metrics: dict[str, Any] | None = None) -> None:
        """Write a checkpoint, after the metrics of the epoch that it ends; `loss` is the sum over samples so far."""
        point, trainer, folder = self.point, self.trainer, self.folder
        with trainer.span("gather", "checkpoint"):
            trainer.wait()
            weights, optimizer = states_of(trainer, self.world)

        def write() -> None:
            if metrics is not None:
                run_directory.add_metrics(folder, metrics)
            progress = {"epoch": point.epoch, "done": point.done, "loss": loss, "data": self.feed.fingerprint}
            progress |= {
                "seconds": time.perf_counter() - self.begun,
                "reducer": trainer.reducer.programs.tuning.state(),
            }
            save(folder / run_directory.CHECKPOINTS, Checkpoint(point.step, weights, optimizer, progress))

        with trainer.span("write" if self.world.rank == 0 else "wait for rank 0", "checkpoint"):
            self.world.call_on_root(write)
        self.saved = time.perf_counter()
        if self.signals is not None:
            self.signals.clear_pending()

    def _write_steps(self) -> None:
        """Write the times of the epoch's steps, of every rank."""
        everyone = np.stack(self.world.all_gather_object(self.trainer.recorder.take_steps()))
        self.world.call_on_root(lambda: run_directory.write_steps(self.folder, self.point.epoch, everyone, KINDS))
        if self.world.rank == 0:
            self.foresight.add_steps(everyone)

    def _seed(self, done: int, step: int) -> None:
        """Seed the random numbers of a step."""
        training, world = self.recipe.training, self.world
        torch.manual_seed(seed_of_step(training.seed, step, world.rank))
        if split_of(self.trainer.model) is not None:
            whole = min(training.batch, self.feed.samples - done * training.batch)
            seed_dropout(self.trainer.model, training.seed, step, bounds(whole, world.size, world.rank)[0])

    def _sum_of_ranks(self, value: float) -> float:
        """Return the sum of a number over all ranks, of which each has it for its own samples."""
        return float(self.world.allreduce(torch.tensor([value], dtype=torch.float64)))

    def _seconds_by_kind(self) -> dict[str, float]:
        """Return the seconds of each kind so far, mean over ranks."""
        seconds = torch.tensor(list(self.trainer.recorder.split().values()), dtype=torch.float64)
        return dict(zip(KINDS, (self.world.allreduce(seconds) / self.world.size).tolist(), strict=True))
