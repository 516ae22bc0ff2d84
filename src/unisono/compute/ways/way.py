"""Interface of a way to compute a convolution: its three passes, and a test for the layers that it can compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from unisono.compute.geometry import Geometry, Pass

Compute = Callable[[Geometry, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to compute a convolution.

    Tensors are (samples, channels, height, width) or (after, before / groups, down, right), in any memory format.
    """

    fits: Callable[[Geometry], bool]
    forward: Compute
    """Returns the outputs, from the inputs and the weight."""
    input_gradient: Compute
    """Returns the gradient of the inputs, from that of the outputs and the weight."""
    weight_gradient: Compute
    """Returns the gradient of the weight, from the inputs and the gradient of the outputs."""

    def compute(self, which: Pass, geometry: Geometry, first: Tensor, second: Tensor) -> Tensor:
        """Return the result of one of the passes."""
        passes = {Pass.FORWARD: self.forward, Pass.INPUT: self.input_gradient, Pass.WEIGHT: self.weight_gradient}
        return passes[which](geometry, first, second)
