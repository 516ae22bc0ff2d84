"""Gradients that backward passes accumulate: on this rank alone until the next average, or in an average.

no_sync:  backward, backward     .grad holds their sum; nothing is sent
backward, or synchronize         the sum is averaged with those of the other ranks
backward, before a step          the next gradients are added to the average, and averaged with it: it stays as it is
    BSP(scale="sum")             a sum of p ranks is divided by p first, so that the ranks' shares of it add up to it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.errors import UsageError
from unisono.reducer.bucket_memory import BucketMemory, lies_in
from unisono.reducer.scattered_gradient import ScatteredGradient


class Accumulation:
    """Accumulated gradients of one rank's model."""

    def __init__(self, memory: BucketMemory, summands: float = 1.0) -> None:
        """Begin without gradients. `summands`: number of ranks whose gradients are summed; 1 where averaged."""
        self._memory, self._summands = memory, summands
        self._summed: set[int] = set()  # parameters whose `.grad` is the sum of the last pass
        self._shares: set[int] = set()  # those where it is this rank's share of that sum
        self._version = self._version_of_pass = self._weights_version()
        self.averages = True
        """True where the next backward pass averages the gradients."""
        self.accumulated = False
        """True where gradients of this rank have been accumulated and not averaged."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block accumulate gradients on this rank alone. The next one after it averages."""
        outer, self.averages = self.averages, False
        try:
            yield
        finally:
            self.averages = outer

    @property
    def accumulates(self) -> bool:
        """True where gradients of this rank alone have been, or are being, accumulated."""
        return self.accumulated or not self.averages

    def begin_pass(self) -> int:
        """Record the weights from which the gradients of a pass are made, and return what `changes` does."""
        self._version_of_pass = self._weights_version()
        return self._version_of_pass - self._version

    def end_average(self) -> None:
        """Record that the gradients of all ranks have been set, for these weights. Raises UsageError where weights have
        changed since the pass began."""
        version = self._weights_version()
        if version != self._version_of_pass:
            raise UsageError(
                "weights have changed while the backward pass ran, from gradients of this rank alone: call "
                "optimizer.step() when backward() has ended, and not in a hook of a parameter"
            )
        self._version = version
        if self._summands > 1:
            self._summed = set(range(len(self._memory.parameters)))
            self._shares.clear()

    def changes(self) -> int:
        """Return how often weights have changed in place since the last average, as an optimizer changes them."""
        return self._weights_version() - self._version

    def forget_replaced(self) -> None:
        """Forget the sum of the last pass where the program has put a gradient of its own in its place."""
        views, parameters = self._memory.views, self._memory.parameters
        self._summed = {index for index in self._summed if lies_in(parameters[index].grad, views[index])}

    def take_share(self, index: int, contributes: bool) -> bool:
        """Make the sum of the last pass in a parameter's `.grad` this rank's share of it. The gradient of the next pass
        is about to be added, or there is none.

        Return True where the rank contributes that share alone: it has no samples, but its weights are those of the
        last pass.
        """
        gradient, view = self._memory.parameters[index].grad, self._memory.views[index]
        if index in self._summed:
            self._summed.remove(index)  # after a step, what lies elsewhere is the program's own gradient
            if gradient is not None and ((contributes and lies_in(gradient, view)) or not self.changes()):
                with torch.no_grad():
                    gradient.div_(self._summands)
                self._shares.add(index)
        return not contributes and index in self._shares

    def _weights_version(self) -> int:
        return sum(parameter._version for parameter in self._memory.parameters)

    def has_gradients(self) -> bool:
        """Return True where this rank has gradients that no average has set. Zeros count if they were accumulated, or
        set by the program; not those that were written in place, as by `zero_grad(set_to_none=False)`."""
        for parameter, view in zip(self._memory.parameters, self._memory.views, strict=True):
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, ScatteredGradient):
                continue
            if self.accumulated or gradient.is_sparse:
                return True
            written = not gradient.is_inference() and gradient._version  # those of inference mode count no versions
            if not lies_in(gradient, view) and (not written or bool(gradient.any())):
                return True
        return False
