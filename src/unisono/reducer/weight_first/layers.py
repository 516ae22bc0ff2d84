"""Layers of a model that compute their weight gradients first: PyTorch's own classes, exactly. A subclass has its own
forward pass, and keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unisono.reducer.weight_first.convolution import CONVOLUTIONS, WeightFirstConvolution
from unisono.reducer.weight_first.linear import WeightFirstLinear
from unisono.reducer.weight_first.readings import ReadingLayer, Readings
from unisono.reducer.weight_first.taken import TakenLayer, taken_of

KINDS: Mapping[type[nn.Module], type[TakenLayer[Any]]] = {
    nn.Linear: WeightFirstLinear,
    **dict.fromkeys(CONVOLUTIONS, WeightFirstConvolution),
}
"""Kinds of taken layers, by the exact class of the layer."""


def take(model: nn.Module, parameters: Sequence[Tensor], ranks: int, ended: Callable[[], Any]) -> Readings:
    """Let the model's layers report to the Readings that are returned. Classes, names and parameters stay as they are.

    A compiled model has products of the compiler: its layers are left unchanged. So are layers whose method the program
    has replaced by one of its own.
    """
    readings, layers = Readings(parameters, ranks, ended), list(model.modules())
    if any(hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in layers):
        return readings
    for layer in layers:
        kind = KINDS.get(type(layer))
        if kind is not None and (kind.replaces not in vars(layer) or taken_of(layer, kind.replaces) is not None):
            kind(layer, readings).take()
        if isinstance(layer, ReadingLayer):
            layer.readings = readings
    return readings


def restore(model: nn.Module, readings: Readings) -> None:
    """Make the layers that report to `readings` report to none, with the methods of their classes again."""
    for layer in model.modules():
        for name in {kind.replaces for kind in KINDS.values()}:
            taken = taken_of(layer, name)
            if taken is not None and taken.readings is readings:
                del vars(layer)[name]
        if isinstance(layer, ReadingLayer) and layer.readings is readings:
            del layer.readings
