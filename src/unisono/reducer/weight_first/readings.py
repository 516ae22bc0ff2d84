"""Weights that a backward pass still reads although their gradients are ready.

gradient of w2   ready ──── exchanged ──────────────▶ update of w2
input gradient         ──── reads w2 ────▶ over ──────┘ waits for both
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch


class Readings:
    """Readings that are pending in the backward pass of one reducer's parameters. A copy of it has no parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor], ranks: int, ended: Callable[[], Any]) -> None:
        """Number the parameters; `ended` is called when the last reading of one has ended."""
        self.ranks = ranks
        """Number of ranks that the gradients are exchanged between."""
        self._parameters, self._ended = tuple(parameters), ended
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._pending: Counter[int] = Counter()

    def of(self, weight: torch.Tensor) -> Reading | None:
        """Return the reading of a weight; None for a tensor that is not one of the parameters."""
        number = self._numbers.get(id(weight))
        return None if number is None else Reading(self, number)

    def begin(self, number: int) -> None:
        """Count a reading of a parameter that ends after its gradient is ready."""
        self._pending[number] += 1

    def end(self, number: int) -> None:
        """Count the end of a reading. One that has not begun does not count."""
        if number in self._pending:
            self._pending[number] -= 1
            if not self._pending[number]:
                del self._pending[number]
                self._ended()

    def are_over(self, parameters: Iterable[int]) -> bool:
        """Return True where no reading of these parameters is pending."""
        return self._pending.keys().isdisjoint(parameters)

    def clear(self) -> None:
        """Forget the pending readings: no pass reads a weight any more."""
        self._pending.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Readings:
        return Readings((), 1, _ignore)

    def __reduce__(self) -> tuple[type[Readings], tuple[Any, ...]]:
        return Readings, ((), 1, _ignore)


class Reading(NamedTuple):
    """Reading of one parameter's weights by the backward pass of its layer."""

    readings: Readings
    number: int

    def begin(self) -> None:
        """Count its begin."""
        self.readings.begin(self.number)

    def end(self) -> None:
        """Count its end."""
        self.readings.end(self.number)


def _ignore() -> None:
    return None


class ReadingLayer:
    """Layer that reports when its backward pass reads its weights."""

    readings = Readings((), 1, _ignore)
    """Readings of the reducer that has the layer's parameters; none before the model is made parallel."""
