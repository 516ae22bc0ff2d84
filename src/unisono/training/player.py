"""A run on one rank: its parts, and the player of its events.

Draw   batches of an epoch, or a worker's own       Save   (test, metrics,) checkpoint
Step   rate, seed, forward, backward, update        Stop   end before the last epoch
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.data.feed import Feed, FeedFacts
from unisono.data.loading import Batch
from unisono.rules.asynchronous import has_servers
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.model import seed_dropout, split_of
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy
from unisono.training.build import DTYPES
from unisono.training.events import Draw, Event, Save, Snapshot, Stop, TrainStep
from unisono.training.measures import last_line, result_metrics, result_rows
from unisono.training.progress import ProgressDisplay
from unisono.training.recipe import Recipe
from unisono.training.signals import STOPPED, SignalHandlers
from unisono.training.timeline import Timeline
from unisono.training.trainer import Trainer
from unisono.world import World


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
    verbose: bool = False
    """True to show details that are otherwise in the log file alone."""
    timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)
    """Lines to report at the start."""

    def __post_init__(self) -> None:
        alone = has_servers(self.trainer.reducer.rule)  # each rank reports for itself
        shows, log_file = alone or self.world.rank == 0, None if alone else self.home / run_directory.LOG
        self.display = ProgressDisplay(shows, self.recipe.training.epochs, not alone, self.verbose, log_file)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, without the time in which it was stopped."""
        return time.perf_counter() - self.began

    def awaited(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Return batches in the number format of the weights; the time until each is there counts as loading."""
        return self.trainer.awaited(iter(batches), DTYPES[self.recipe.model.dtype])

    def end_at_once(self, after: str = "") -> None:
        """End all ranks at once, after a second SIGTERM."""
        self.world.abort(STOPPED, f"unisono: rank {self.world.rank}: a second SIGTERM: ended at once{after}\n")

    def warn(self, line: str) -> None:
        """Print a warning about a step that takes long after a signal, on the rank that got the signal."""
        print(f"unisono: rank {self.world.rank}: {line}", file=sys.stderr, flush=True)

    def results(self, accuracy: Accuracy, samples: float, seconds: float) -> dict[str, Any]:
        """Return the metrics of a test, and of `samples` samples that were trained on in `seconds`."""
        return result_metrics(accuracy, samples / max(seconds, 1e-9), self.feed.labels_per_sample)

    def report(self, results: dict[str, Any], rows: list[tuple[str, str]], by_kind: dict[str, float]) -> None:
        """Show the table at the end: results, further rows, and the seconds of each kind of time."""
        self.display.end([*result_rows(results), *rows], by_kind)

    def report_last(self, results: dict[str, Any]) -> None:
        """Print the folder of the run, and the line that scripts read."""
        self.display.log(f"run: {self.home}")
        self.display.log(last_line(results))


class EventPlayer(ABC):
    """Player of the events of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.signals: SignalHandlers | None = None
        self._batches: Iterator[Batch] = iter(())

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
                    if self.signals is not None:
                        self.signals.clear_pending()
                case Stop():
                    return event
        return None

    @abstractmethod
    def draw(self, event: Draw) -> Iterator[Batch]:
        """Return the batches of the steps that follow."""

    def step(self, event: TrainStep) -> tuple[float, int]:
        """Train on the next batch. Return the sum of the loss over its samples, and their number."""
        run, (inputs, labels) = self.run, next(self._batches)
        for group in run.trainer.optimizer.param_groups:
            group["lr"] = event.rate
        torch.manual_seed(event.seed)
        if split_of(run.trainer.model) is not None:
            batch, seed = run.recipe.training.batch, run.recipe.training.seed
            whole = min(batch, run.feed.samples - event.done * batch)
            seed_dropout(run.trainer.model, seed, event.number, bounds(whole, run.world.size, run.world.rank)[0])
        return run.trainer.step(inputs, labels), len(labels)

    @abstractmethod
    def save(self, event: Save) -> None:
        """Write a checkpoint, after the metrics of the epoch that it ends."""

    def save_own(self, event: Snapshot) -> None:
        """Write this worker's state. Only a worker that servers order to has such events."""
        raise NotImplementedError(event)
