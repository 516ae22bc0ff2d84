"""Events of a run on a rank: what it does next, by a fixed order or by the replies of servers; one player for both.

    fixed order   Draw, TrainStep, TrainStep, Save, ..., Save │ Draw, ...   rules that all ranks follow together
    replies       Draw, TrainStep, TrainStep, Snapshot, Save, ...           a worker that follows its servers' orders

A generator yields an event and goes on when the player (`player.py`) has carried it out: so it knows what came with a
step, requests of signals or replies, before it says what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from unisono.asynchronous.messages import WorkerHeader
from unisono.data.order import steps_of
from unisono.training.recipe import Recipe, rate_of_step


@dataclass(frozen=True)
class RunPoint:
    """Progress of a run: `step` steps in all, `done` of them in `epoch`.

    `loss` is the sum of the loss over this rank's samples of the epoch so far.
    """

    epoch: int = 0
    done: int = 0
    step: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    """Seconds that the run had taken when it stopped; 0 for a new run."""
    data: str = ""
    """Fingerprint of the data that a resumed run was trained on."""
    made_on: str = ""
    """Processor and versions on which the bits of a resumed run depend; "" where an older release has not told."""


class Draw(NamedTuple):
    """Draw the samples of the steps that follow `done` steps: those of an epoch, or a worker's own."""

    epoch: int
    done: int


class TrainStep(NamedTuple):
    """Train on the next batch."""

    number: int
    """Number of steps made before, in the whole run."""
    done: int
    """Number of them in this epoch."""
    rate: float
    seed: int
    """Seed of this rank's random numbers (dropout): checkpoints need not keep their state."""
    exchange: WorkerHeader | None = None
    """Header of the exchange with the servers in this step; None without one."""


class Snapshot(NamedTuple):
    """Write this worker's state as it was when it sent `header`, for the checkpoint `cut` of all workers."""

    cut: int
    header: WorkerHeader
    known: int
    """Samples of all workers, as the reply before had them."""


class Save(NamedTuple):
    """Write a checkpoint; at the end of an epoch the weights are tested, and its metrics written, before."""

    point: RunPoint
    tests: bool = False
    """True at the end of an epoch."""
    why: str = ""
    """Signal that has requested it, in words; empty without one."""


class CopyState(NamedTuple):
    """Write copies of the state into the memory of hosts."""

    point: RunPoint


class Stop(NamedTuple):
    """End the run before its last epoch, after a checkpoint. `why` is the signal that has requested it, in words."""

    why: str


Event = Draw | TrainStep | Snapshot | Save | CopyState | Stop


def fixed_order(
    recipe: Recipe,
    samples: int,
    rank: int,
    begin: RunPoint,
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
            asked, every = requests(), training.checkpoint_every
            if "stop" in asked:
                yield Save(point)
                yield Stop(f"SIGTERM to {asked['stop']}")
                return
            if point.done < steps and ("save" in asked or (every and point.step % every == 0)):
                yield Save(point, why=f"SIGUSR1 to {asked['save']}" if "save" in asked else "")
            elif point.done < steps and "copy" in asked:
                yield CopyState(point)
        point = replace(point, epoch=point.epoch + 1, done=0)
        yield Save(point, tests=True)
        if point.epoch < training.epochs and (who := stopping()):  # SIGTERM after the last step's control message
            yield Stop(f"SIGTERM to {who}")
            return


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """Return the seed of the random numbers of a rank's step."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)
