"""A run on one rank: its parts, and the player of its events, for all rules and for those whose ranks train together.

Draw   batches of an epoch, or a worker's own       Save   (test, metrics,) checkpoint
Step   rate, seed, forward, backward, update        Stop   end before the last epoch

Ranks that train together have epochs in a fixed order:

┌─ an epoch ─────────────────────────────────────────────────┐
│ load, rate, step, load, rate, step, ... (checkpoint) ...   │ test ─ metrics ─ checkpoint
└────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.data.feed import Feed, FeedFacts
from unisono.data.loading import PROCESSOR, Batch, to_device
from unisono.data.order import steps_of
from unisono.reducer import requested_by
from unisono.rules.asynchronous import has_servers
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.model import seed_dropout, split_of
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy, LossSum
from unisono.training.audit import Audit
from unisono.training.build import DTYPES
from unisono.training.checkpoint.files import save
from unisono.training.checkpoint.layout import Checkpoint
from unisono.training.events import CopyState, Draw, Event, RunPoint, Save, Snapshot, Stop, TrainStep, fixed_order
from unisono.training.foresight import RunForesight
from unisono.training.measures import last_line, result_metrics, result_rows
from unisono.training.memory_copies import MemoryCopies
from unisono.training.progress import ProgressDisplay
from unisono.training.recipe import Recipe, rate_of_step
from unisono.training.recorder import KINDS
from unisono.training.signals import STOPPED, SignalHandlers
from unisono.training.state import check_change, discard_newer, made_on, resume_run, states_of
from unisono.training.timeline import Timeline
from unisono.training.trainer import Trainer
from unisono.world import World


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run beside its recipe."""

    folder: Path | None = None
    """Folder of a new run; None for a new one under runs/."""
    resume: Path | None = None
    """Folder of the run that is resumed."""
    trace: Path | None = None
    """File for the timeline."""
    replay: Path | None = None
    """Folder of the asynchronous run that is replayed."""
    machine: str | None = None
    """Machine that the run is predicted for before its first step."""
    ledger: Path | None = None
    """File for prediction and measurement; None for that beside the run's folder."""
    memory: Path | None = None
    """Folder for copies of the state in memory, from which the next ranks go on; None for none."""
    verbose: bool = False
    """True to show the details that are otherwise in the run's log file alone."""


@dataclass
class Run:
    """Parts of a run, made on all ranks together."""

    recipe: Recipe
    world: World
    feed: FeedFacts
    """Batches, or of a rank that only serves their facts."""
    trainer: Trainer
    home: Path
    began: float
    """Start of the run on `time.perf_counter`, as if the run had never stopped."""
    options: TrainOptions = field(default_factory=TrainOptions)
    timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)
    """Lines to report at the start."""
    audit: Audit | None = None
    """Hashes of the steps, and shares that are computed again; None for neither."""

    def __post_init__(self) -> None:
        self.alone = has_servers(self.trainer.reducer.rule)
        """True where each rank tests, writes and reports for itself."""
        self.writes = self.alone or self.world.rank == 0
        log_file = None if self.alone else self.home / run_directory.LOG
        epochs, verbose = self.recipe.training.epochs, self.options.verbose
        self.display = ProgressDisplay(self.writes, epochs, not self.alone, verbose, log_file)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, without the time in which it was stopped."""
        return time.perf_counter() - self.began

    def awaited(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Return batches on the device and in the number format of the weights; the time until each is there counts as
        loading."""
        return self.trainer.awaited(to_device(batches, self.trainer.device), DTYPES[self.recipe.model.dtype])

    def end_at_once(self, after: str = "") -> None:
        """End all ranks at once, after a second SIGTERM."""
        self.world.abort(STOPPED, f"unisono: rank {self.world.rank}: a second SIGTERM: ended at once{after}\n")

    def warn(self, line: str) -> None:
        """Print a warning about a step that takes long after a signal, on the rank that got the signal."""
        print(f"unisono: rank {self.world.rank}: {line}", file=sys.stderr, flush=True)

    def results(self, accuracy: Accuracy, samples: float, seconds: float) -> dict[str, Any]:
        """Return the metrics of a test, and of `samples` samples that were trained on in `seconds`."""
        return result_metrics(accuracy, samples / max(seconds, 1e-9), self.feed.labels_per_sample)

    def report(self, results: dict[str, Any], rows: list[tuple[str, str]], by_kind: Mapping[str, float]) -> None:
        """Show the table at the end: results, further rows, and the seconds of each kind of time."""
        self.display.end([*result_rows(results), *rows], by_kind)

    def report_last(self, results: dict[str, Any]) -> None:
        """Print the folder of the run, and the line that scripts read."""
        self.display.log(f"run: {self.home}")
        self.display.log(last_line(results))


class Timer:
    """Says once in so many seconds that they are over; never for 0."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Count the seconds from now on."""
        self._last = time.monotonic()

    def due(self) -> bool:
        """Return True where the seconds are over, and count them anew."""
        if not self._seconds or time.monotonic() - self._last < self._seconds:
            return False
        self.restart()
        return True


class EventPlayer(ABC):
    """Player of the events of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.signals: SignalHandlers | None = None
        self.accuracy: Accuracy | None = None
        """Accuracy of the weights that were saved last at the end of an epoch."""
        self.losses = LossSum()
        """Loss of this rank's samples since it was last recorded."""
        self._batches: Iterator[Batch] = iter(())

    @abstractmethod
    def begin(self, before: Recipe | None) -> None:
        """Load the state of a run that is resumed, whose recipe was `before`; None for a new run. Collective."""

    @abstractmethod
    def train(self) -> int:
        """Play the run to its end. Return the exit code. Called by all ranks together."""

    @property
    def feed(self) -> Feed:
        """Batches of this rank, which trains."""
        assert isinstance(self.run.feed, Feed), "a rank that trains has batches"
        return self.run.feed

    def play(self, events: Iterable[Event]) -> Stop | None:
        """Carry out the events. Return the one that stopped the run before its last epoch, if one did."""
        for event in events:
            match event:
                case Draw():
                    self._batches = iter(())  # the threads of an epoch end before those of the next one begin
                    self._batches = self.run.awaited(self.draw(event))
                case TrainStep():
                    self.step(event)
                case Snapshot():
                    self.save_own(event)
                case Save():
                    self.save(event)
                case CopyState():
                    self.copy_state(event)
                case Stop():
                    return event
        return None

    def step(self, event: TrainStep) -> int:
        """Train on the next batch, and add the loss of its samples. Return their number."""
        run, (inputs, labels) = self.run, next(self._batches)
        for group in run.trainer.optimizer.param_groups:
            group["lr"] = event.rate
        on_host = run.trainer.device == PROCESSOR  # where torch.manual_seed formats the stack, for other devices
        (torch.default_generator.manual_seed if on_host else torch.manual_seed)(event.seed)
        batch, seed = run.recipe.training.batch, run.recipe.training.seed
        whole = min(batch, run.feed.samples - event.done * batch)
        if split_of(run.trainer.model) is not None:
            seed_dropout(run.trainer.model, seed, event.number, bounds(whole, run.world.size, run.world.rank)[0])
        if run.audit is None:
            loss = run.trainer.step(inputs, labels, whole, event.seed)
        else:
            numbers = self.feed.order[event.done * batch :][:whole]
            loss = run.audit.step(event.number + 1, event.seed, numbers, inputs, labels)
        self.losses.add(loss, len(labels))
        return len(labels)

    def save(self, event: Save) -> None:
        """Write a checkpoint; at the end of an epoch the weights are tested, and its metrics written, before."""
        run, metrics = self.run, None
        run.trainer.wait()
        with self.shared():
            if event.tests:
                metrics = self.end_epoch()
            with run.trainer.span("gather", "checkpoint"):
                checkpoint = self.checkpoint(event)

        def write() -> None:
            if metrics is not None:
                run_directory.add_metrics(run.home, metrics)
            save(run.home / run_directory.CHECKPOINTS, checkpoint)

        with run.trainer.span("write" if run.writes else "wait for rank 0", "checkpoint"):
            if run.alone:
                write()
            else:
                run.world.call_on_root(write)
        if metrics is not None:
            run.display.epoch(metrics)
        self.report_saved(event)
        if self.signals is not None:
            self.signals.pending_since = None

    @abstractmethod
    def draw(self, event: Draw) -> Iterator[Batch]:
        """Return the batches of the steps that follow."""

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are saved."""
        return nullcontext()

    @abstractmethod
    def end_epoch(self) -> dict[str, Any]:
        """Test the weights. Return the metrics of the epoch."""

    @abstractmethod
    def checkpoint(self, event: Save) -> Checkpoint:
        """Return the checkpoint to write."""

    @abstractmethod
    def report_saved(self, event: Save) -> None:
        """Report a checkpoint that was written."""

    def copy_state(self, event: CopyState) -> None:
        """Write copies of the state into memory. Only ranks that train together have such events."""
        raise NotImplementedError(event)

    def save_own(self, event: Snapshot) -> None:
        """Write this worker's state. Only a worker that servers order to has such events."""
        raise NotImplementedError(event)


class TogetherPlayer(EventPlayer):
    """Player on a rank that has the same events as all others, at the same time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        memory = run.options.memory
        alike = not run.trainer.reducer.traits.state.differs and run.trainer.reducer.sharded is None
        alike = alike and split_of(run.trainer.model) is None
        self._copies = None if memory is None else MemoryCopies(memory, run.home, run.world, alike, run.warn)
        self._first = RunPoint()  # where the run begins
        self.made = 0
        """Steps made."""
        self._foresight: RunForesight
        self._drawn, self._epoch_began = Draw(0, 0), 0.0
        self._timer = Timer(60 * run.recipe.training.checkpoint_minutes)
        self._due = False  # True where the clock has requested the checkpoint of this step

    def begin(self, before: Recipe | None) -> None:
        run = self.run
        if before is None:
            return
        point, damaged, notes = resume_run(run.home, run.trainer, run.world, run.options.memory)
        check_change(before, run.recipe, point, run.feed.fingerprint)
        self._first, self.losses, self.made = point, LossSum(point.loss), point.step
        run.began -= point.seconds
        notes += run.world.call_on_root(lambda: discard_newer(run.home, point.step, damaged))
        begins = f"{run.home} has no checkpoint yet: the run begins again"
        if point.made_on not in ("", here := made_on()):
            notes.append(f"the run was computed with {point.made_on}, and goes on with {here}")
        run.notes[:0] = [*notes, f"resumes after step {point.step}" if point.step else begins]

    def train(self) -> int:
        run = self.run
        with run.display:
            for note in run.notes:
                run.display.log(note)
            run.trainer.reducer.programs.log_with(run.display.log, run.display.detail)
            self._foresight = RunForesight(run, run.options.ledger)
            self._foresight.begin(run.options.machine, self.made)
            self._timer.restart()
            with SignalHandlers(
                run.trainer.request, lambda: run.end_at_once(f", after step {self.made}"), run.warn
            ) as self.signals:
                code = self._finish()
                self.signals.saved = code == STOPPED
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
        results = run.results(accuracy, seen - min(first.done * training.batch, seen), seconds)
        run.report(results, [("steps", f"{self.made}"), ("time", f"{seconds:.2f} s")], self._seconds_by_kind())
        self._foresight.finish(run.elapsed)
        run.report_last(results)
        return 0

    def draw(self, event: Draw) -> Iterator[Batch]:
        """Return this rank's share of the rest of an epoch."""
        self._drawn, self._epoch_began = event, time.perf_counter()
        return self.feed.epoch(event.epoch, self.run.recipe.training.batch, event.done)

    def step(self, event: TrainStep) -> int:
        self._due = self.run.world.rank == 0 and self._timer.due()
        if self._due:
            self.run.trainer.request("save")
        if self._copies is not None and self.run.world.rank == 0 and self._copies.due():
            self.run.trainer.request("copy")
        samples = super().step(event)
        self.made = event.number + 1
        steps = steps_of(self.run.feed.samples, self.run.recipe.training.batch)
        self.run.display.step(self._drawn.epoch, event.done + 1, steps, self.losses.last)
        self._foresight.after_step(self.made)
        return samples

    def copy_state(self, event: CopyState) -> None:
        """Write copies of the state into the memory of two hosts."""
        assert self._copies is not None, "a rank without them does not ask for them"
        self.run.trainer.wait()
        with self.run.trainer.span("copy", "checkpoint"), self.shared():
            self._copies.write(lambda: self.checkpoint(Save(event.point)))

    def checkpoint(self, event: Save) -> Checkpoint:
        """Return the state of all ranks."""
        run = self.run
        loss = 0.0 if event.tests else self._sum_of_ranks(self.losses.total)
        weights, optimizer = states_of(run.trainer, run.world)
        reached = replace(event.point, loss=loss, seconds=run.elapsed)
        reached = replace(reached, data=run.feed.fingerprint, made_on=made_on())
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
