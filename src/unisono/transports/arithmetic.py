"""Sums of equal stretches of memory, in the order of ranks, for every dtype that the collectives carry.

Sums and copies are planned as steps and performed then or later: a plan that is played again costs no Python between
its steps.

    float64, float32, integers   summed as they are, by NumPy
    float16, bfloat16            summed in float32, rounded once at the end, by PyTorch (NumPy has no bfloat16)

NumPy is used where it can be: for blocks of 128 to 512 KB its addition is about twice as fast as PyTorch's here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.errors import TensorError

Array = NDArray[Any]

Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A call that is planned: a function and its arguments."""

NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
}
"""The dtypes that are summed as they are."""

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that are summed in float32."""


class Arithmetic(Protocol):
    """How memory of one dtype is seen, copied and summed. A view is a flat array or tensor; slices share its memory."""

    def view(self, buffer: Any) -> Any:
        """The elements in `buffer`, sharing its memory."""

    def copy(self, into: Any, source: Any) -> Step:
        """Copy one view into another of the same length."""

    def total(self, sources: Sequence[Any], into: Any) -> list[Step]:
        """Sum the views in their order. `into` may be one of them; the others stay as they are."""


def perform(steps: Iterable[Step]) -> None:
    """Do what was planned."""
    for function, arguments in steps:
        function(*arguments)


class Exact:
    """Sums in the dtype itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = NUMPY_DTYPES[dtype]

    def view(self, buffer: Any) -> Array:
        """The elements in `buffer`, sharing its memory."""
        return np.frombuffer(buffer, self.dtype)

    def copy(self, into: Array, source: Array) -> Step:
        """Copy one view into another of the same length."""
        return np.copyto, (into, source)

    def total(self, sources: Sequence[Array], into: Array) -> list[Step]:
        """Sum the views in their order. `into` may be one of them; the others stay as they are."""
        if len(sources) == 1:
            return [] if sources[0] is into else [self.copy(into, sources[0])]
        later = any(source is into for source in sources[2:])
        partial = np.empty_like(into) if later else into
        steps: list[Step] = [(np.add, (sources[0], sources[1], partial))]
        for source in sources[2:]:
            before = partial
            partial = into if source is into else partial  # from there on the sum may live where it belongs
            steps.append((np.add, (before, source, partial)))
        return steps


class Widened:
    """Sums in float32, rounded once to the dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def view(self, buffer: Any) -> torch.Tensor:
        """The elements in `buffer`, sharing its memory."""
        if len(buffer) == 0:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer(buffer, dtype=self.dtype)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Step:
        """Copy one view into another of the same length."""
        return into.copy_, (source,)

    def total(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> list[Step]:
        """Sum the views in their order. `into` may be one of them; the others stay as they are."""
        return [(_total_in_float32, (tuple(sources), into))]


def _total_in_float32(sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    partial = sources[0].float()
    for source in sources[1:]:
        partial += source.float()
    into.copy_(partial)


ARITHMETICS: dict[torch.dtype, Arithmetic] = {
    **{dtype: Exact(dtype) for dtype in NUMPY_DTYPES},
    **{dtype: Widened(dtype) for dtype in HALF_DTYPES},
}


def arithmetic_of(dtype: torch.dtype) -> Arithmetic:
    """The arithmetic of a dtype. Raises TensorError for a dtype that the collectives do not sum."""
    if dtype in ARITHMETICS:
        return ARITHMETICS[dtype]
    known = ", ".join(str(known).removeprefix("torch.") for known in ARITHMETICS)
    raise TensorError(f"cannot sum a tensor of {str(dtype).removeprefix('torch.')}; can sum {known}")
