"""Gradients that backward passes accumulate on this rank alone, until the next average.

no_sync:  backward, backward     .grad holds their sum; nothing is sent
backward, or synchronize         the sum is averaged with those of the other ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.scattered_gradient import ScatteredGradient


class Accumulation:
    """Accumulated gradients of one rank's model."""

    def __init__(self, memory: BucketMemory) -> None:
        self._memory = memory
        self.averages = True
        """True where the next backward pass averages the gradients."""
        self.accumulated = False
        """True where gradients of this rank have been accumulated and not averaged."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block accumulate gradients on this rank alone. The next one after it averages."""
        self.averages = False
        try:
            yield
        finally:
            self.averages = True

    @property
    def accumulates(self) -> bool:
        """True where gradients of this rank alone have been, or are being, accumulated."""
        return self.accumulated or not self.averages

    def has_gradients(self) -> bool:
        """Return True where this rank has gradients that no average has set."""
        return any(
            parameter.grad is not None
            and not isinstance(parameter.grad, ScatteredGradient)
            and (self.accumulated or parameter.grad.is_sparse or parameter.grad.data_ptr() != view.data_ptr())
            for parameter, view in zip(self._memory.parameters, self._memory.views, strict=True)
        )
