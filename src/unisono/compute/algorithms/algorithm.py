"""Interface of a convolution algorithm: its three passes, and a test for the layers that it can compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from unisono.compute.geometry import Geometry, Pass

Compute = Callable[[Geometry, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ConvolutionAlgorithm:
    """Algorithm for the three passes of a convolution.

    Inputs and outputs are (samples, channels, height, width), the weight is (out_channels, in_channels / groups,
    height, width), each in any memory format.
    """

    fits: Callable[[Geometry], bool]
    forward: Compute
    """Returns the outputs, from the inputs and the weight."""
    grad_input: Compute
    """Returns the gradient of the inputs, from that of the outputs and the weight."""
    grad_weight: Compute
    """Returns the gradient of the weight, from the inputs and the gradient of the outputs."""

    def compute(self, which: Pass, geometry: Geometry, first: Tensor, second: Tensor) -> Tensor:
        """Return the result of one of the passes."""
        passes = {Pass.FORWARD: self.forward, Pass.GRAD_INPUT: self.grad_input, Pass.GRAD_WEIGHT: self.grad_weight}
        return passes[which](geometry, first, second)
