"""Events of a run on a rank, and their player, for all rules and for those whose ranks train together.

    fixed order   Draw, TrainStep, TrainStep, Save, ..., Save │ Draw, ...   rules that all ranks follow together
    replies       Draw, TrainStep, TrainStep, CopyState, Save, ...          a worker that follows its servers' orders

A generator yields an event and goes on when the player has carried it out: so it knows what came with a step, requests
of signals or replies, before it says what follows.

Ranks that train together have epochs in a fixed order:

┌─ an epoch ─────────────────────────────────────────────────┐
│ load, rate, step, load, rate, step, ... (checkpoint) ...   │ test ─ metrics ─ checkpoint
└────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from unisono.asynchronous.messages import WorkerHeader
from unisono.data.feed import Feed
from unisono.data.loading import Batch
from unisono.data.order import steps_of
from unisono.device import seed_random_numbers
from unisono.reducer import requested_by
from unisono.reducer.made_on import made_on
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.model import seed_dropout, split_of
from unisono.training import run_directory, state
from unisono.training.accuracy import Accuracy, LossSum
from unisono.training.checkpoint.files import save
from unisono.training.checkpoint.layout import Checkpoint
from unisono.training.cut import WorkerCounters
from unisono.training.foresight import RunForesight
from unisono.training.measures import result_rows
from unisono.training.memory_copies import MemoryCopies
from unisono.training.recipe import Recipe, rate_of_step
from unisono.training.signals import STOPPED, SignalHandlers, Timer
from unisono.training.trainer import KINDS, seed_of_step

if TYPE_CHECKING:
    from unisono.training.run import Run


class Draw(NamedTuple):
    """Draw the samples of the steps that follow `done` steps: those of an epoch, or a worker's own."""

    epoch: int
    done: int


class TrainStep(NamedTuple):
    """Train on the next batch."""

    number: int
    """Number of steps made before, in the whole run; `done` of them in this epoch."""
    done: int
    rate: float
    seed: int
    """Seed of this rank's random numbers (dropout): checkpoints need not keep their state."""
    exchange: WorkerHeader | None = None
    """Header of the exchange with the servers in this step; None without one."""


class Save(NamedTuple):
    """Write a checkpoint; at the end of an epoch the weights are tested, and its metrics written, before."""

    point: state.RunPoint
    tests: bool = False
    """True at the end of an epoch."""
    why: str = ""
    """Signal that has requested it, in words; empty without one."""


class CopyState(NamedTuple):
    """Write copies of the state into the memory of hosts; a worker writes its own state to disk, as it was when it sent
    the header, for the checkpoint of `point.step`."""

    point: state.RunPoint
    counters: WorkerCounters | None = None
    """Progress of the worker, for the checkpoint of all workers."""


class Stop(NamedTuple):
    """End the run before its last epoch, after a checkpoint. `why` is the signal that has requested it, in words."""

    why: str


Event = Draw | TrainStep | Save | CopyState | Stop


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
        """Carry out the events. Return the event that stopped the run before its last epoch, if any did."""
        for event in events:
            match event:
                case Draw():
                    self._batches = iter(())  # the threads of an epoch end before those of the next one begin
                    self._batches = self.run.awaited(self.draw(event))
                case TrainStep():
                    self.step(event)
                case CopyState():
                    self.copy_state(event)
                case Save():
                    self.save(event)
                case Stop():
                    return event
        return None

    def step(self, event: TrainStep) -> int:
        """Train on the next batch, and add the loss of its samples. Return their number."""
        run, (inputs, labels) = self.run, next(self._batches)
        for group in run.trainer.optimizer.param_groups:
            group["lr"] = event.rate
        seed_random_numbers(run.trainer.device, event.seed)
        batch, seed = run.recipe.training.batch, run.recipe.training.seed
        batch_size = min(batch, run.feed.samples - event.done * batch)
        if split_of(run.trainer.model) is not None:
            seed_dropout(run.trainer.model, seed, event.number, bounds(batch_size, run.world.size, run.world.rank)[0])
        if run.audit is None:
            loss = run.trainer.step(inputs, labels, batch_size, event.seed)
        else:
            numbers = self.feed.order[event.done * batch :][:batch_size]
            loss = run.audit.step(event.number + 1, event.seed, numbers, inputs, labels)
        self.losses.add(loss, len(labels))
        return len(labels)

    def save(self, event: Save) -> None:
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

    @abstractmethod
    def copy_state(self, event: CopyState) -> None:
        """Write copies of the state."""


class TogetherPlayer(EventPlayer):
    """Player on a rank that has the same events as all others, at the same time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        memory = run.options.memory
        alike = not run.trainer.reducer.traits.state.differs and run.trainer.reducer.sharded is None
        alike = alike and split_of(run.trainer.model) is None
        self._copies = None if memory is None else MemoryCopies(memory, run.home, run.world, alike, run.warn)
        self._first = state.RunPoint()  # where the run begins
        self.made = 0
        """Steps made."""
        self._timer = Timer(60 * run.recipe.training.checkpoint_minutes)
        self._due = False  # True while the clock has requested a checkpoint: at the end of a period

    def begin(self, before: Recipe | None) -> None:
        run = self.run
        if before is None:
            return
        point, damaged, notes = state.resume_run(run.home, run.trainer, run.world, run.options.memory)
        state.check_change(before, run.recipe, point, run.feed.fingerprint)
        self._first, self.losses, self.made = point, LossSum(point.loss), point.step
        run.began -= point.seconds
        notes += run.world.call_on_root(lambda: state.discard_newer(run.home, point.step, damaged))
        notes += state.describe_change(point, run.feed.fingerprint)
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
            self._foresight = RunForesight(run, self.made)
            self._foresight.begin()
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
        stop = self.play(fixed_order(run.recipe, samples, run.world.rank, first, run.trainer.requests, self._stopping))
        if stop is not None:
            run.display.log(f"saved step {self.made} on {stop.why}; resume with: unisono train --resume {run.home}")
            return STOPPED
        accuracy = self._test() if self.accuracy is None else self.accuracy
        seconds = time.perf_counter() - began
        seen = max(0, training.epochs - first.epoch) * samples
        results = run.results(accuracy, seen - min(first.done * training.batch, seen), seconds)
        rows = [*result_rows(results), ("steps", f"{self.made}"), ("time", f"{seconds:.2f} s")]
        run.display.end(rows, self._seconds_by_kind())
        self._foresight.finish(run.elapsed)
        run.report_last(results)
        return 0

    def draw(self, event: Draw) -> Iterator[Batch]:
        self._drawn, self._epoch_began = event, time.perf_counter()
        return self.feed.epoch(event.epoch, self.run.recipe.training.batch, event.done)

    def step(self, event: TrainStep) -> int:
        if self.run.world.rank == 0 and self._timer.due():
            self._due = True
            self.run.trainer.request("save")
        if self._copies is not None and self.run.world.rank == 0 and self._copies.due():
            self.run.trainer.request("copy")
        samples = super().step(event)
        self.made = event.number + 1
        steps = steps_of(self.run.feed.samples, self.run.recipe.training.batch)
        self.run.display.step(self._drawn.epoch, event.done + 1, steps, self.losses.last)
        self._foresight.after_step()
        return samples

    def copy_state(self, event: CopyState) -> None:
        assert self._copies is not None, "a rank without them does not ask for them"
        self.run.trainer.wait()
        with self.run.trainer.span("copy", "checkpoint"):
            self._copies.write(lambda: self.checkpoint(Save(event.point)))

    def checkpoint(self, event: Save) -> Checkpoint:
        run = self.run
        loss = 0.0 if event.tests else self._sums_of_ranks(self.losses.total)[0]
        weights, optimizer = state.states_of(run.trainer, run.world)
        reached = replace(event.point, loss=loss, seconds=run.elapsed, data=run.feed.fingerprint)
        tuned = run.trainer.reducer.programs.tuning.state()
        progress = {**asdict(reached), "made_on": made_on(), "reducer": tuned}
        return Checkpoint(reached.step, weights, optimizer, progress)

    def report_saved(self, event: Save) -> None:
        """Write the times of an epoch's steps, or log a checkpoint that a signal has requested."""
        run, epoch = self.run, event.point.epoch
        self._timer.restart()
        if event.tests:
            everyone = np.stack(run.world.all_gather_object(run.trainer.recorder.take_steps()))
            run.world.call_on_root(lambda: run_directory.write_steps(run.home, epoch, everyone, KINDS))
            if run.world.rank == 0:
                self._foresight.add_steps(everyone)
        elif event.why and not self._due:
            run.display.log(f"saved step {self.made} on {event.why}")
        if event.why or "save" in run.trainer.requests():
            self._due = False

    def end_epoch(self) -> dict[str, Any]:
        run, training, samples = self.run, self.run.recipe.training, self.run.feed.samples
        self._batches = iter(())
        seconds, steps = time.perf_counter() - self._epoch_began, steps_of(samples, training.batch)
        loss, self.losses = self._sums_of_ranks(self.losses.total)[0], LossSum()
        epoch, skipped = self._drawn.epoch, min(self._drawn.done * training.batch, samples)
        rate = rate_of_step(run.recipe.optimizer, epoch, steps - 1, steps, training.epochs, training.batch)
        self.accuracy = self._test()
        return {
            "epoch": epoch + 1,
            "step": self.made,
            "learning_rate": rate,
            "loss": loss / samples,
            **run.results(self.accuracy, samples - skipped, seconds),
            "seconds": seconds,
            "elapsed": run.elapsed,
            **self._seconds_by_kind(),
        }

    def _test(self) -> Accuracy:
        feed = self.feed
        batches = self.run.awaited(feed.test_batches(self.run.recipe.training.batch))
        return self.run.trainer.evaluate(batches, feed.test_samples * feed.labels_per_sample)

    def _stopping(self) -> str:
        """Return the ranks that have received SIGTERM, in words; empty where none has."""
        stops = float(self.signals is not None and self.signals.stop)
        count, ranks = self._sums_of_ranks(stops, stops * self.run.world.rank)
        return requested_by(count, ranks) if count else ""

    def _sums_of_ranks(self, *values: float) -> list[float]:
        """Return the sum of each number over all ranks."""
        sums: list[float] = self.run.world.allreduce(torch.tensor(values, dtype=torch.float64)).tolist()
        return sums

    def _seconds_by_kind(self) -> dict[str, float]:
        """Return the seconds of each kind so far, mean over ranks."""
        sums = self._sums_of_ranks(*self.run.trainer.recorder.split().values())
        return {kind: seconds / self.run.world.size for kind, seconds in zip(KINDS, sums, strict=True)}


def fixed_order(
    recipe: Recipe,
    samples: int,
    rank: int,
    begin: state.RunPoint,
    requests: Callable[[], Mapping[str, str]],
    stopping: Callable[[], str],
) -> Iterator[Event]:
    """Yield the events of a run whose ranks all train together, on `samples` samples an epoch, from `begin` on.

    `requests` returns the requests that came with the last step, "save", "stop" and "copy", and who has made them;
    `stopping`, called at the end of an epoch, who has requested the end since then, in words, or "". Both are equal on
    all ranks.
    """
    training, point = recipe.training, begin
    seat = 0 if training.virtual_ranks else rank  # each share makes a seed of its own of that of the step
    steps = steps_of(samples, training.batch)
    while point.epoch < training.epochs:
        yield Draw(point.epoch, point.done)
        while point.done < steps:
            rate = rate_of_step(recipe.optimizer, point.epoch, point.done, steps, training.epochs, training.batch)
            yield TrainStep(point.step, point.done, rate, seed_of_step(training.seed, point.step, seat))
            point = replace(point, done=point.done + 1, step=point.step + 1)
            asked, interval = requests(), training.checkpoint_every
            if "stop" in asked:
                yield Save(point)
                yield Stop(f"SIGTERM to {asked['stop']}")
                return
            if point.done < steps and ("save" in asked or (interval and point.step % interval == 0)):
                yield Save(point, why=f"SIGUSR1 to {asked['save']}" if "save" in asked else "")
            elif point.done < steps and "copy" in asked:
                yield CopyState(point)
        point = replace(point, epoch=point.epoch + 1, done=0)
        yield Save(point, tests=True)
        if point.epoch < training.epochs and (who := stopping()):  # SIGTERM after the last step's control message
            yield Stop(f"SIGTERM to {who}")
            return
