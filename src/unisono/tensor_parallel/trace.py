"""Trace of a model's forward passes: seconds, calls and sizes of each module, by hooks that are removed again.

Sequential ┬ fc1    1.2 ms        a module's seconds are its own, without those of the modules that it calls;
           ├ relu   0.1 ms        so they add up to those of the model
           └ fc2    1.1 ms
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

REPETITIONS = 5
"""Timed forward passes, after one that is not."""

Example = Tensor | tuple[Any, ...]
"""Inputs of a model for a batch: a tensor, or the arguments of its `forward`. The first is (samples, ...)."""


@dataclass
class ModuleTrace:
    """Trace of one module."""

    calls: int = 0
    """Calls in a forward pass."""
    inputs: Tensor | None = None
    """First argument of its last call, on the meta device; None where it is no tensor."""
    outputs: Tensor | None = None
    """Result of its last call, on the meta device; None where it is no tensor."""
    backward: bool = False
    """True where that argument needs a gradient."""
    seconds: list[float] = field(default_factory=list)
    """Own seconds in each forward pass."""

    @property
    def median(self) -> float:
        """Own seconds in a forward pass, the median."""
        return median(self.seconds)


def samples_of(example: Example) -> int:
    """Return the number of samples in a batch."""
    first = example[0] if isinstance(example, tuple) else example
    return len(first)


def trace_forward(
    model: nn.Module, example: Example, within: Callable[[], AbstractContextManager[Any]]
) -> dict[str, ModuleTrace]:
    """Return the traces of the modules that a forward pass calls, by name, in the order of their first calls.

    Passes build the graph, as in training, in the model's present mode. Buffers and random numbers are as before
    afterwards. `within` gives the context in which the model computes.
    """
    found: dict[str, ModuleTrace] = {}
    stack: list[list[float]] = []  # begin of each module that is running, and seconds of the modules that it has called
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    arguments = example if isinstance(example, tuple) else (example,)

    def begin(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_: nn.Module, inputs: Any) -> None:
            trace = found.setdefault(name, ModuleTrace())
            first = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
            trace.calls += 1
            trace.inputs = None if first is None else first.detach().to("meta")
            trace.backward = first is not None and first.requires_grad
            stack.append([time.perf_counter(), 0.0])

        return hook

    def end(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, outputs: Any) -> None:
            since, called = stack.pop()
            took = time.perf_counter() - since
            if stack:
                stack[-1][1] += took
            trace = found[name]
            trace.outputs = outputs.detach().to("meta") if isinstance(outputs, Tensor) else None
            trace.seconds[-1:] = [took - called + (trace.seconds[-1] if trace.calls > 1 else 0.0)]

        return hook

    with ExitStack() as hooks, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(begin(name)).remove)
            hooks.callback(module.register_forward_hook(end(name)).remove)
        for _ in range(1 + REPETITIONS):
            for trace in found.values():
                trace.calls = 0
                trace.seconds.append(0.0)
            stack.clear()
            with within():
                model(*arguments)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for trace in found.values():
        del trace.seconds[0]
    return found
