"""Products of a convolution on samples.

    2 ranks, 64 images of 32 x 32, 64 ─▶ 128 channels of 3 x 3, float32, gathered in 4 slices of 16 images:

    products   │ x0 * w │ x1 * w   │ x2 * w   │ x3 * w   │              x_i (16, 64, 32, 32), weight (64, 64, 3, 3)
    exchanges           │ gather 0 │ gather 1 │ gather 2 │ gather 3 │   each of 8.4 MB: a rank sends 1/2 of it

In the backward pass sums of the input's gradient are beside the other slices, and beside the weight's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class ConvolutionProducts:
    """Products of a convolution padded with zeros: weight (out, in, *kernel), bias (out), rows (in, *positions)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def row_dims(self) -> int:
        """Number of dimensions of a sample: channels and positions."""
        return 1 + len(self.stride)

    def positions(self, sizes: tuple[int, ...], kernel: tuple[int, ...]) -> int:
        """Return the number of output positions of a sample with input positions `sizes`."""
        each = zip(sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        return prod(
            (size + 2 * pad - dilation * (length - 1) - 1) // step + 1 for size, length, step, pad, dilation in each
        )

    def outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, (samples, out, *positions)."""
        none = [0] * len(self.stride)
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, none, 1)

    def grad_input(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of samples of this shape, of which nothing else is read."""
        found = self._gradients(gradient, gradient.new_empty(1).expand(shape), weight, (True, False, False))[0]
        assert found is not None
        return found

    def grad_weight(self, gradient: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of a weight of this shape, of which nothing else is read."""
        found = self._gradients(gradient, x, gradient.new_empty(1).expand(shape), (False, True, False))[1]
        assert found is not None
        return found

    def _gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, ...]:
        none = [0] * len(self.stride)
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, self.stride, self.padding, self.dilation, False, none, 1, mask
        )
        return found
