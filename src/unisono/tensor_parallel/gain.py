"""Gain of each split layer: its times in training beside those of the whole layer, by part.

    layer          part           split ms   unsplit ms   ratio
    classifier.1   forward            1.10         1.21    1.10      products alone
                   backward           2.31         2.52    1.09
                   activations        0.60         0.00    0.00      exchange, which is waited for
                   gradients         ~0.00        ~9.80              exchange, hidden or not
                   together           4.01        13.53    3.37

Forward, backward and activations are the medians of the newest calls in training. The unsplit products are those of a
whole layer, made and timed at the end, on a rank's own samples: a p-th of the group's. A layer too large for that
counts as long as the split one, whose products have as many operations. Gradients are predicted from the cost of an
allreduce. All are means over ranks. What is not split is not here: ranks of a group of p compute it p times as long.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.plan.split import gradient_seconds
from unisono.tensor_parallel.choose_plan import measure_link
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.tensor_parallel.model import split_of
from unisono.tensor_parallel.plan import PART

REPETITIONS = 5
"""Timed passes of a whole layer, after one that is not."""

MAX_WHOLE_BYTES = 1 << 30
"""Bytes of the largest whole layer that is made to be timed; with its gradient it takes twice that."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_load_state_dict_pre_hooks")
"""Attributes of a module that hold what a split layer has registered."""

Context = Callable[[], AbstractContextManager[Any]]


class LayerGain(NamedTuple):
    """Seconds of one part of a layer in a step, split and not."""

    layer: str
    part: str
    """Forward, backward, activations, gradients, or together."""
    split: float
    unsplit: float
    measured: bool = True
    """True where the unsplit seconds are measured."""


def measure_gain(model: nn.Module, within: Context = nullcontext) -> list[LayerGain]:
    """Return the gain of each split layer that was trained, the same on all ranks, which call this together.

    Called after training, while nothing is exchanged. `within` gives the context in which the model computes.
    """
    found = split_of(model)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, ParallelLayer)}
    if found is None or not layers:
        return []
    cost, ranks = measure_link(found.world), found.world.size
    mine = {name: _own_gain(name, layer, found.plan.sharing, within) for name, layer in layers.items()}
    gains = list[LayerGain]()
    for name, layer in layers.items():
        weights = _whole_bytes(layer)
        split, whole = (gradient_seconds(weights, ranks, size, cost) for size in (layer.split.ranks, 1))
        everyone = [one for one in found.world.all_gather_object(mine[name]) if one]  # not of ranks without samples
        if everyone:
            parts = [*map(_mean, zip(*everyone, strict=True)), LayerGain(name, "gradients", split, whole, False)]
            total = sum(one.split for one in parts), sum(one.unsplit for one in parts)
            gains += [*parts, LayerGain(name, "together", *total, measured=False)]
    return gains


def describe_gain(gains: Sequence[LayerGain]) -> list[str]:
    """Return a table, a line each; no line where nothing is split. `~` marks what is predicted."""
    if not gains:
        return []
    wide = max(len("layer"), *(len(one.layer) for one in gains))
    lines = [f"{'layer':<{wide}}  {'part':<11}  {'split ms':>9}  {'unsplit ms':>10}  {'ratio':>6}"]
    for one in gains:
        name = one.layer if one.part == "forward" else ""
        ratio = f"{one.unsplit / one.split:.2f}" if one.split > 0 else ""
        split = f"{'~' * (one.part == 'gradients')}{one.split * 1e3:.2f}"
        unsplit = f"{'~' * (not one.measured)}{one.unsplit * 1e3:.2f}"
        lines.append(f"{name:<{wide}}  {one.part:<11}  {split:>9}  {unsplit:>10}  {ratio:>6}")
    return lines


def whole_layer(layer: ParallelLayer) -> nn.Module:
    """Return a layer of the class and the sizes that a split one had before, with weights of 0."""
    whole = copy.copy(layer)
    for name in HOOKS:
        whole.__dict__[name] = OrderedDict()
    whole.__class__ = next(one for one in type(layer).__mro__ if not issubclass(one, ParallelLayer))  # type: ignore[assignment]
    whole.__dict__["_parameters"] = {
        name: None
        if own is None
        else nn.Parameter(torch.zeros(_whole_shape(layer, name), dtype=own.dtype, device=own.device), own.requires_grad)
        for name, own in layer._parameters.items()
    }
    return whole


def time_whole(layer: ParallelLayer, sharing: int, within: Context) -> tuple[float, float] | None:
    """Return the seconds of the forward and the backward pass of the whole layer on a `sharing`-th of the samples.

    None where the layer is too large.
    """
    times = layer.times
    if times.inputs is None or _whole_bytes(layer) > MAX_WHOLE_BYTES:
        return None
    samples, *shape = times.inputs.shape
    if layer.split.takes == PART:
        shape[-1] *= layer.split.ranks
    whole, took = whole_layer(layer), list[tuple[float, float]]()
    for _ in range(1 + REPETITIONS):
        x = torch.zeros((max(1, samples // sharing), *shape), dtype=times.inputs.dtype)
        x.requires_grad_(times.needs_gradient)
        begun = time.perf_counter()
        with within(), torch.enable_grad():
            y = whole(x)
        between = time.perf_counter()
        y.backward(torch.ones_like(y))
        took.append((between - begun, time.perf_counter() - between))
        whole.zero_grad()
    forward, backward = zip(*took[1:], strict=True)
    return median(forward), median(backward)


def _own_gain(name: str, layer: ParallelLayer, sharing: int, within: Context) -> list[LayerGain]:
    """Return this rank's gain in all but the gradients; [] where it has made no pass."""
    medians = layer.times.medians()
    if medians is None:
        return []
    forward, backward = medians
    whole = time_whole(layer, sharing, within)
    one, other = (forward.products, backward.products) if whole is None else whole
    return [
        LayerGain(name, "forward", forward.products, one, whole is not None),
        LayerGain(name, "backward", backward.products, other, whole is not None),
        LayerGain(name, "activations", forward.activations + backward.activations, 0.0),
    ]


def _mean(everyone: tuple[LayerGain, ...]) -> LayerGain:
    split, unsplit = fmean(one.split for one in everyone), fmean(one.unsplit for one in everyone)
    return everyone[0]._replace(split=split, unsplit=unsplit, measured=all(one.measured for one in everyone))


def _whole_shape(layer: ParallelLayer, name: str) -> tuple[int, ...]:
    own = layer.get_parameter(name).shape
    return layer.parts[name].whole_shape(own) if name in layer.parts else tuple(own)


def _whole_bytes(layer: ParallelLayer) -> int:
    """Return the bytes of the whole layer's parameters."""
    named = dict(layer.named_parameters(recurse=False))
    return sum(torch.Size(_whole_shape(layer, name)).numel() * own.element_size() for name, own in named.items())
