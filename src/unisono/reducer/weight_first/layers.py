"""Layers of a model that compute their weight gradients first: PyTorch's own classes, exactly. A subclass has its own
forward pass, and keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unisono.reducer.weight_first.convolution import WeightFirstConv1d, WeightFirstConv2d, WeightFirstConv3d
from unisono.reducer.weight_first.linear import WeightFirstLinear
from unisono.reducer.weight_first.readings import ReadingLayer, Readings

CLASSES: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: WeightFirstLinear,
    nn.Conv1d: WeightFirstConv1d,
    nn.Conv2d: WeightFirstConv2d,
    nn.Conv3d: WeightFirstConv3d,
}
"""Classes of layers that compute the weight gradient first, by the exact class of the layer."""


def take(model: nn.Module, parameters: Sequence[Tensor], ranks: int, ended: Callable[[], Any]) -> Readings:
    """Let the model's layers report to the Readings that are returned. Names and parameters stay as they are.

    A compiled model has products of the compiler: its layers are left unchanged.
    """
    readings, layers = Readings(parameters, ranks, ended), list(model.modules())
    if any(hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in layers):
        return readings
    for layer in layers:
        if type(layer) in CLASSES:
            layer.__class__ = CLASSES[type(layer)]
        if isinstance(layer, ReadingLayer):
            layer.readings = readings
    return readings


def restore(model: nn.Module, readings: Readings) -> None:
    """Make the layers that report to `readings` report to none, and PyTorch's own classes again."""
    own = {ours: theirs for theirs, ours in CLASSES.items()}
    reporting: list[nn.Module] = [
        layer for layer in model.modules() if isinstance(layer, ReadingLayer) and layer.readings is readings
    ]
    for layer in reporting:
        del layer.readings
        if type(layer) in own:
            layer.__class__ = own[type(layer)]
