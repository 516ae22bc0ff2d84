"""What every way of computing a convolution offers: its three passes, and whether it can compute a layer at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from unisono.compute.geometry import Geometry, Pass

Compute = Callable[[Geometry, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """All tensors are (samples, channels, height, width) or (after, before / groups, down, right), in any memory."""

    fits: Callable[[Geometry], bool]
    forward: Compute
    """Outputs, from the inputs and the weight."""
    input_gradient: Compute
    """The gradient of the inputs, from that of the outputs and the weight."""
    weight_gradient: Compute
    """The gradient of the weight, from the inputs and the gradient of the outputs."""

    def compute(self, which: Pass, geometry: Geometry, first: Tensor, second: Tensor) -> Tensor:
        """One of the passes."""
        passes = {Pass.FORWARD: self.forward, Pass.INPUT: self.input_gradient, Pass.WEIGHT: self.weight_gradient}
        return passes[which](geometry, first, second)
