"""Loop of a program's own whose state is kept in memory: after a death it goes on with the ranks that there are.

    unisono run --elastic --ranks 4 train.py

    loop = Loop(world, model=model, optimizer=optimizer)
    for step in loop.steps(1000):             from the step that was kept, 0 at first
        ...

    rank 0, 1     step 0 │ copy │ step 1 ... step 40 │ copy │ ...        at most 2% of the time
    rank 1 dies: all begin again, load the copy of step 40, and make step 41
    SIGTERM: all end after a copy, which `unisono run --elastic --resume RUN train.py` begins with

What is kept has a `state_dict` that is the same on all ranks, and `load_state_dict`. The samples of a step are the
program's own: draw them by the number of the step, or keep the loader, too.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from unisono.elastic.standby import FOLDER_VARIABLE
from unisono.launch import MEMORY_VARIABLE
from unisono.training.checkpoint.files import load_newest
from unisono.training.checkpoint.layout import Checkpoint, checkpoint_names
from unisono.training.memory_copies import MemoryCopies, newest_copy
from unisono.training.run_directory import CHECKPOINTS
from unisono.training.signals import STOPPED
from unisono.world import World


class Kept(Protocol):
    """Object whose state is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state: tensors, numbers, texts, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Load a state."""


class Loop:
    """Steps of a program that `unisono run --elastic` has started; without it, nothing is kept, and all are made."""

    def __init__(self, world: World, **kept: Kept) -> None:
        """Keep the states of `kept`; called by all ranks together, once model and optimizer are made."""
        folder, self._home = os.environ.get(MEMORY_VARIABLE), Path(os.environ.get(FOLDER_VARIABLE, ""))
        self._world, self._kept, self._stop = world, kept, False
        self._folder = Path(folder) if folder else None
        self._copies = None if self._folder is None else MemoryCopies(self._folder, self._home, world, True, self._warn)

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left of `count`. A state is kept after some of them."""
        if self._folder is None or self._copies is None:
            yield from range(count)
            return
        signal.signal(signal.SIGTERM, self._on_stop)
        copy = newest_copy(self._folder, self._world) or self._world.call_on_root(self._stored)
        if copy is not None:
            for name, state in copy.weights.items():
                self._kept[name].load_state_dict(state)
        begin = due = 0 if copy is None else copy.step
        began = time.monotonic()
        for step in range(begin, count):
            yield step
            if step < due:
                continue
            stops = self._world.allreduce(torch.tensor(int(self._stop)), op="maximum")
            self._copies.write(lambda made=step + 1: self._checkpoint(made))  # type: ignore[misc]
            if stops:
                self._copies.wait()
                sys.exit(STOPPED)
            steps = self._copies.seconds * (step + 1 - begin) / (time.monotonic() - began)
            due = step + int(self._world.broadcast(torch.tensor(max(1, math.ceil(steps)))))

    def _stored(self) -> Checkpoint | None:
        """Return what the run had in memory when it ended, if it is resumed."""
        checkpoints = self._home / CHECKPOINTS
        return load_newest(checkpoints)[0] if checkpoint_names(checkpoints) else None

    def _checkpoint(self, step: int) -> Checkpoint:
        return Checkpoint(step, {name: one.state_dict() for name, one in self._kept.items()}, {}, {})

    def _on_stop(self, _number: int, _frame: object) -> None:
        self._stop = True

    def _warn(self, line: str) -> None:
        print(f"unisono: rank {self._world.rank}: {line}", file=sys.stderr, flush=True)
