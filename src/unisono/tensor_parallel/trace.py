"""Trace of a model's forward passes: seconds, calls and sizes of each module, by hooks on a copy of it.

Sequential ┬ fc1    1.2 ms        a module's seconds are its own, without those of the modules that it calls;
           ├ relu   0.1 ms        so they add up to those of the model
           └ fc2    1.1 ms
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.tensor_parallel.outside_reads import OutsideReads

REPETITIONS = 5
"""Timed forward passes, after one that is not."""

Example = Tensor | tuple[Any, ...]
"""Inputs of a model for a batch: a tensor, or the arguments of its `forward`. The first is (samples, ...)."""


@dataclass
class ModuleTrace:
    """Trace of one module."""

    calls: list[int] = field(default_factory=lambda: [0] * (1 + REPETITIONS))
    """Calls in each forward pass."""
    inputs: Tensor | None = None
    """First argument of its last call, on the meta device; None where it is no tensor."""
    outputs: Tensor | None = None
    """Result of its last call, on the meta device; None where it is no tensor."""
    backward: bool = False
    """True where that argument needs a gradient."""
    read_outside: bool = False
    """True where one of its own parameters was read while it did not run."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * (1 + REPETITIONS))
    """Own seconds in each forward pass."""

    @property
    def median(self) -> float:
        """Own seconds in a timed forward pass, the median."""
        return median(self.seconds[1:])

    @property
    def once(self) -> bool:
        """True where each forward pass called it once, and nothing else read its parameters."""
        return set(self.calls) == {1} and not self.read_outside


def samples_of(example: Example) -> int:
    """Return the number of samples in a batch."""
    first = example[0] if isinstance(example, tuple) else example
    return len(first)


def trace_forward(
    model: nn.Module,
    example: Example,
    within: Callable[[], AbstractContextManager[Any]],
    repetitions: int = REPETITIONS,
) -> dict[str, ModuleTrace]:
    """Return the traces of the modules that a forward pass calls, by name, in the order of their first calls.

    Passes build the graph, as in training, in the model's present mode. They are those of a copy: the model stays as it
    is, and so do the random numbers of PyTorch, NumPy and Python. `within` gives the context in which the model
    computes, `repetitions` is the number of timed passes. Raises UsageError for a model that cannot be copied.
    """
    shadow = _copy_of(model)
    record = _CallRecord(shadow, 1 + repetitions)
    arguments = example if isinstance(example, tuple) else (example,)
    with _random_numbers_kept(), torch.enable_grad():
        for number in range(1 + repetitions):
            record.begin_pass(number)
            with within(), record.reads:
                shadow(*arguments)
    return record.finish()


class _CallRecord:
    """Record of the calls of a model's modules, by hooks that stay on it."""

    def __init__(self, model: nn.Module, passes: int) -> None:
        self.reads = OutsideReads(model)
        self._passes = passes
        self._traces: dict[str, ModuleTrace] = {}
        self._pass = 0
        self._clocks: list[list[float]] = []
        """Begin of each module that runs, and seconds of the modules that it has called."""
        for name, module in model.named_modules():  # next to `forward`: other hooks may read a weight too
            module.register_forward_pre_hook(partial(self._begin, name))
            module.register_forward_hook(partial(self._end, name), prepend=True)

    def begin_pass(self, number: int) -> None:
        """Begin a forward pass, the first of which has the number 0."""
        self._pass = number
        self.reads.running.clear()
        self._clocks.clear()

    def finish(self) -> dict[str, ModuleTrace]:
        """Return the traces by name."""
        for name in self.reads.found & self._traces.keys():
            self._traces[name].read_outside = True
        return self._traces

    def _begin(self, name: str, _: nn.Module, inputs: Any) -> None:
        trace = self._traces.setdefault(name, ModuleTrace([0] * self._passes, seconds=[0.0] * self._passes))
        first = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        trace.calls[self._pass] += 1
        trace.inputs = None if first is None else first.detach().to("meta")
        trace.backward = first is not None and first.requires_grad
        self.reads.running.append(name)
        self._clocks.append([time.perf_counter(), 0.0])

    def _end(self, name: str, _: nn.Module, __: Any, outputs: Any) -> None:
        running = self.reads.running
        depth = len(running) - 1 - running[::-1].index(name)  # behind it: calls that failed, and the model went on
        since, called = self._clocks[depth]
        took = time.perf_counter() - since
        del running[depth:], self._clocks[depth:]
        if self._clocks:
            self._clocks[-1][1] += took
        trace = self._traces[name]
        trace.outputs = outputs.detach().to("meta") if isinstance(outputs, Tensor) else None
        trace.seconds[self._pass] += took - called
        self.reads.look(outputs)


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model. Raises UsageError for one that cannot be copied."""
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{type(model).__name__} cannot be copied, and layers are chosen by forward passes of a copy: {words}; "
            'name the layers in a plan of your own in place of "auto"'
        ) from error


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Give the generators of PyTorch, NumPy and Python the states back that they had before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
