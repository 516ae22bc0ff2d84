"""Seconds of a model's steps and layers, measured on a copy: the model and the random numbers stay as they are.

Seconds of a layer are a + b n for n samples. Traces with all samples and with half of them give a, most of which is
the time in which its weights come from memory: of a part of the layer, that is a part.

    seconds    layer of 64 MiB of weights, 8 samples          in groups of 4, 32 samples, a fourth of the outputs
       7.0     8 samples   = 6.4 + 0.6                        6.4 / 4 + 0.6 = 2.2
       6.7     4 samples   = 6.4 + 0.3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.device import host_memory
from unisono.errors import UsageError
from unisono.plan.trace import (
    Trace,
    all_random_numbers_kept,
    copy_of,
    device_of,
    now,
    pass_back,
    tensors_in,
    trace_values,
)
from unisono.processor import HOST

Context = Callable[[], AbstractContextManager[Any]]
"""Function that returns the context in which a model computes."""


class StepSeconds(NamedTuple):
    """Seconds of the parts of a step."""

    forward: float
    backward: float
    pack: float
    """Copy of all gradients, times a factor, to memory that is sent."""
    update: float
    """Update of all weights by SGD with momentum."""


def time_steps(
    model: nn.Module,
    inputs: Sequence[Any],
    within: Context,
    steps: int,
    begin: Callable[[], None],
) -> list[StepSeconds]:
    """Return the seconds of whole steps on these values, after one that does not count; `begin` is called before each.

    A trace's sum is longer than a step, by the time of its hooks. The model and the random numbers stay as they are.
    Gradients of a device are copied to the host.
    """
    measured, device = list[StepSeconds](), device_of(model)
    with all_random_numbers_kept(device):
        shadow = copy_of(model, {})
        parameters = list(shadow.parameters())
        optimizer = torch.optim.SGD(parameters, 0.0, momentum=0.9) if parameters else None
        sent = [host_memory(tensor.numel(), tensor.dtype, device).view(tensor.shape) for tensor in parameters]
        for _ in range(1 + steps):
            begin()
            times = [now(device)]
            with within(), torch.enable_grad():
                outputs = shadow(*inputs)
                times.append(now(device))
                pass_back(outputs, shadow)
            times.append(now(device))
            for parameter, memory in zip(parameters, sent, strict=True):
                if parameter.grad is not None and device.type == HOST:
                    torch.mul(parameter.grad, 0.5, out=memory)
                elif parameter.grad is not None:
                    memory.copy_(parameter.grad, non_blocking=True)
            times.append(now(device))
            if optimizer is not None:
                optimizer.step()
            measured.append(StepSeconds(*(later - before for before, later in pairwise([*times, now(device)]))))
            shadow.zero_grad()
    return measured[1:]


def time_layers(
    model: nn.Module,
    inputs: Sequence[Any],
    within: Context,
    steps: int,
    agreed: Callable[[bool], bool] = bool,
) -> tuple[Trace, Tensor]:
    """Return the layers of a step on these values, with the modules that each trace called once, and the median seconds
    of `steps` steps of each module, (modules, 4): of its forward and backward pass, and of these what does not depend
    on the number of samples, by its measurements: below 0, or more than all, by chance.

    The first of `inputs` is (samples, ...). That part is 0 where another has not as many rows, or the model takes no
    half of them, on one rank at least: `agreed`, which all ranks call together, says whether it is True on all.
    """
    half, traces, fewer = _half(inputs), [trace_values(model, inputs, within())], list[Trace]()
    if not agreed(bool(half)):
        half = []
    else:
        try:
            trace_values(model, half, within())
        except UsageError:  # a batch norm takes no single sample
            half = []
        half = half if agreed(bool(half)) else []
    for _ in range(steps):  # by turns: what else runs slows down both
        traces.append(trace_values(model, inputs, within()))
        fewer += [trace_values(model, half, within())] if half else []
    names = [name for name, _ in model.named_modules()]
    once = frozenset.intersection(*(trace.once for trace in traces))
    seconds, fixed = _median(traces[1:], names), torch.zeros(len(names), 2, dtype=torch.float64)
    if half:
        count, of_half = len(inputs[0]), len(half[0])
        fixed = (count * _median(fewer, names) - of_half * seconds) / (count - of_half)
    return Trace(traces[-1].layers, once), torch.cat([seconds, fixed], 1)


def _half(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs with half of the samples; none where a tensor has not as many rows: it may number others'."""
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    rows = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    nested = len([*tensors_in(inputs)]) > len(tensors)
    if nested or not isinstance(inputs[0], Tensor) or len(rows) > 1 or max(rows) < 2:
        return []
    return [each[: max(rows) // 2] if isinstance(each, Tensor) else each for each in inputs]


def _median(traces: Sequence[Trace], names: Sequence[str]) -> Tensor:
    """Return the median seconds of each module's passes, (modules, 2)."""
    runs = [{layer.name: (layer.forward_seconds, layer.backward_seconds) for layer in run.layers} for run in traces]
    seconds = [[run.get(name, (0.0, 0.0)) for name in names] for run in runs]
    return torch.tensor(seconds, dtype=torch.float64).median(0).values
