"""Loop of a program's own whose state is kept in memory: after a death it goes on with the ranks that there are.

    unisono run --elastic --ranks 4 train.py

    loop = Loop(world, model=model, optimizer=optimizer)
    for step in loop.steps(1000):             from the step that was kept, 0 at first
        ...

    rank 0, 1     step 0 │ copy │ step 1 ... step 40 │ copy │ ...        at most 2% of the time
    rank 1 dies: all begin again, load the copy of step 40, and make step 41
    both hosts die: all begin again, from the newest checkpoint on the disk, one each 10 minutes
    SIGTERM: in about a second all end after a copy, which `unisono run --elastic --resume RUN train.py` begins with

A second SIGTERM ends all at once, as in `unisono train`. After the last step signals mean what they did before.

What is kept has a `state_dict` that is the same on all ranks, and `load_state_dict`; the number of averages of parallel
models, from which random numbers of shares follow, goes with it. The samples of a step are the program's own: draw them
by the number of the step, or keep the loader, too.
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
from unisono.errors import UsageError
from unisono.launch import MEMORY_VARIABLE
from unisono.reducer import Reducer, reducer_of
from unisono.reducer.made_on import code_of, difference, made_on, refuse
from unisono.tensor_parallel.model import named_parts
from unisono.training.checkpoint.files import discard_newer, flatten_state, load_first, load_newest
from unisono.training.checkpoint.layout import Checkpoint, DamagedCheckpointError, checkpoint_names, step_of
from unisono.training.memory_copies import MemoryCopies, newest_copy
from unisono.training.run_directory import CHECKPOINTS
from unisono.training.signals import STOPPED, SignalHandlers
from unisono.world import World

ASK_SECONDS = 1.0
"""Seconds between two steps after which all ranks ask whether to end or to copy; less where copies come more often."""

MAX_HELD = 256
"""Steps in a row that are not kept since they accumulate gradients; then one is: a program may never use them."""


class Kept(Protocol):
    """Object whose state is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state: tensors, numbers, texts, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Load a state."""


class Loop:
    """Steps of a program that `unisono run --elastic` has started; without it, nothing is kept, and all are made."""

    def __init__(self, world: World, *, checkpoint_minutes: float = 10.0, **kept: Kept) -> None:
        """Keep the states of `kept`; called by all ranks together, once model and optimizer are made. Each
        `checkpoint_minutes` a copy is written to the disk as well, beside the steps; 0: never.

        Raises CheckpointError for a state that cannot be kept, UsageError where ranks' weights differ: by a rule, or
        split layers.
        """
        folder, self._home = os.environ.get(MEMORY_VARIABLE), Path(os.environ.get(FOLDER_VARIABLE, ""))
        self._world, self._kept, self._begun = world, kept, False
        self._folder = Path(folder) if folder else None
        self._copies: MemoryCopies | None = None
        if self._folder is not None:
            self._reducers()
            for name, stateful in kept.items():
                flatten_state(stateful.state_dict(), f"the state of {name}")
            self._copies = MemoryCopies(self._folder, self._home, world, True, self._warn, checkpoint_minutes)

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left of `count`, perhaps none. A state is kept after some of them.

        Raises UsageError where it is called again: the state that is kept would be loaded anew.
        """
        if self._begun:
            raise UsageError("a Loop counts its steps once: make those of all epochs in one loop.steps(epochs * steps)")
        self._begun = True
        if self._folder is None or self._copies is None:
            yield from range(count)
            return
        with SignalHandlers(lambda _: None, self._end, self._warn, (signal.SIGTERM,)) as signals:
            newest = newest_copy(self._folder, self._world)
            stored, damaged = self._world.call_on_root(lambda: self._stored(newest))
            copy = stored or newest
            self._check_alike({} if copy is None else copy.progress, resumed=newest is None)
            if copy is not None:
                self._load(copy)
            begin, waited = 0 if copy is None else copy.step, 0
            ask = begin
            discarded = self._world.call_on_root(lambda: discard_newer(self._home / CHECKPOINTS, begin, damaged))
            for note in discarded if self._world.rank == 0 else ():
                self._warn(note)
            began = time.monotonic()
            for step in range(begin, count):
                yield step
                if step < ask and step + 1 < count:
                    continue
                due = self._world.rank == 0 and self._copies.due()
                held = any(reducer.accumulation.accumulated for reducer in self._reducers().values())
                state = torch.tensor([int(signals.stop), int(self._copies.writing), int(due), int(held)])
                stops, writing, due, held = self._world.allreduce(state, op="maximum").tolist()
                if held and step + 1 < count and waited < MAX_HELD:  # no state has them: the next step is asked
                    ask, waited = step + 1, waited + 1
                    continue
                waited = 0
                if (due and not writing) or stops:
                    self._copies.write(lambda made=step + 1: self._checkpoint(made), bool(stops))  # type: ignore[misc]
                if stops:
                    self._copies.wait()
                    signals.saved = True
                    sys.exit(STOPPED)
                seconds = min(self._copies.seconds, ASK_SECONDS)
                steps = seconds * (step + 1 - begin) / (time.monotonic() - began)
                ask = step + int(self._world.broadcast(torch.tensor(max(1, math.ceil(steps)))))

    def _check_alike(self, before: dict[str, Any], resumed: bool) -> None:
        """Compare the program of all ranks, and what they compute with, to those of the generation `before`. A run that
        is `resumed` may have another program.

        Raises UsageError where they differ and a model has virtual ranks; else rank 0 warns.
        """
        programs = self._world.all_gather_object(_program())
        mine = self._world.call_on_root(made_on)  # that of ranks was compared when the model was made parallel
        made = {f"rank {rank}": f"{mine}, {program}" for rank, program in enumerate(programs)}
        if "made_on" in before:
            program = programs[0] if resumed else before["program"]
            made["the generation before"] = f"{before['made_on']}, {program}"
        if differing := difference(made):
            for reducer in self._reducers().values():
                if (virtual := reducer.programs.virtual) is not None:
                    refuse(f"virtual_ranks = {virtual.count}", differing)
            if self._world.rank == 0:
                self._warn(differing)

    def _stored(self, copy: Checkpoint | None) -> tuple[Checkpoint | None, list[DamagedCheckpointError]]:
        """Return the newest complete checkpoint of the run, if there is one that is newer than the `copy` in memory,
        and the damaged ones before it. Raises CheckpointError where there is no copy, and no checkpoint is complete."""
        checkpoints, step = self._home / CHECKPOINTS, -1 if copy is None else copy.step
        names = [name for name in reversed(checkpoint_names(checkpoints)) if step_of(name) > step]
        return load_newest(checkpoints, names) if names and copy is None else load_first(checkpoints, names)

    def _checkpoint(self, step: int) -> Checkpoint:
        averages = {name: reducer.control.averages for name, reducer in self._reducers().items()}
        states = {name: stateful.state_dict() for name, stateful in self._kept.items()}
        return Checkpoint(step, states, {}, {"averages": averages, "made_on": made_on(), "program": _program()})

    def _load(self, copy: Checkpoint) -> None:
        if unlike := sorted(copy.weights.keys() ^ self._kept.keys()):
            raise UsageError(
                f"the state that was kept and this Loop differ in {', '.join(unlike)}: keep the same objects as before"
            )
        for name, state in copy.weights.items():
            self._kept[name].load_state_dict(state)
        averages = copy.progress.get("averages", {})
        for name, reducer in self._reducers().items():
            reducer.control.averages = averages.get(name, reducer.control.averages)

    def _reducers(self) -> dict[str, Reducer]:
        """Return that of each parallel model. It counts averages: random numbers of the model's shares follow from
        them. Raises UsageError where ranks' weights differ: one rank's alone are kept."""
        models = [(name, stateful) for name, stateful in self._kept.items() if isinstance(stateful, torch.nn.Module)]
        if split := [name for name, model in models if named_parts(model)]:
            raise UsageError(
                f"rank {self._world.rank}: a Loop keeps one rank's state, but layers of {split[0]} are split over "
                "ranks: leave them whole, or train by a recipe, with `unisono train --elastic`"
            )
        parts = {f"{name}.{path}": reducer_of(part) for name, model in models for path, part in model.named_modules()}
        reducers = {name: reducer for name, reducer in parts.items() if reducer is not None}
        for reducer in reducers.values():
            if reducer.traits.state.differs:
                raise UsageError(
                    f"rank {self._world.rank}: a Loop keeps one rank's state, but by its rule ranks have different "
                    "weights: take BSP or Sharded, or train by a recipe, with `unisono train --elastic`"
                )
        return reducers

    def _end(self) -> None:
        """End all ranks at once, after a second SIGTERM."""
        self._world.abort(STOPPED, f"unisono: rank {self._world.rank}: a second SIGTERM: ended at once\n")

    def _warn(self, line: str) -> None:
        print(f"unisono: rank {self._world.rank}: {line}", file=sys.stderr, flush=True)


def _program() -> str:
    """Return the name of the program's file, with a digest of its content; "" without one."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return code_of(Path(file)) if file else ""
