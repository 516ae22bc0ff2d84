"""Layer of a model of which one method is ours. The layer has the method, and the method has the layer weakly.

nn.Linear  .forward ──▶ WeightFirstLinear.forward ──▶ TakenLayer ╌╌weak╌╌▶ the same nn.Linear
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from unisono.errors import UsageError
from unisono.reducer.weight_first.readings import ReadingLayer, Readings

Layer = TypeVar("Layer", bound=nn.Module)


class TakenLayer(Generic[Layer]):
    """Layer whose class, names and parameters stay; its method `replaces` is that of this class."""

    replaces: ClassVar[str]
    """Name of the method, here and in the layer's class."""

    def __init__(self, layer: Layer, readings: Readings = ReadingLayer.readings) -> None:
        self._layer = weakref.ref(layer)  # without a cycle, a model is freed as soon as it is forgotten
        self.readings = readings
        """Readings of the reducer that has the layer's parameters; a copy of the layer has none."""

    @property
    def layer(self) -> Layer:
        """Layer itself. Raises UsageError where only its method was kept."""
        layer = self._layer()
        if layer is None:
            raise UsageError(f"{self.replaces} of a layer that no longer exists was called: keep the layer, too")
        return layer

    def take(self) -> None:
        """Put the method in the place of the layer's own."""
        vars(self.layer)[self.replaces] = getattr(self, self.replaces)

    def __reduce__(self) -> tuple[type[TakenLayer[Layer]], tuple[Layer]]:
        return type(self), (self.layer,)


def taken_of(layer: nn.Module, name: str) -> TakenLayer[Any] | None:
    """Return the taken layer that has a layer's method of this name; None where it is the class's, or the program's."""
    found = getattr(vars(layer).get(name), "__self__", None)
    return found if isinstance(found, TakenLayer) else None
