"""Linear layers: outputs = inputs weight^T + bias, with the three products that PyTorch computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.reducer.weight_first.decision import call_of, pays
from unisono.reducer.weight_first.product import compute
from unisono.reducer.weight_first.readings import ReadingLayer


class LinearProduct:
    """Product of a linear layer: inputs (..., in), weight (out, in), bias (out)."""

    def outputs(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, (..., out)."""
        return functional.linear(inputs, weight, bias)

    def grad_input(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the inputs, (..., in)."""
        return (gradient.reshape(-1, gradient.shape[-1]) @ weight).view(inputs.shape)

    def grad_weight(
        self,
        gradient: Tensor,
        inputs: Tensor,
        weight: Tensor,  # noqa: ARG002  Product's
        biased: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the weight, (out, in), and of the bias, (out)."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        return rows.t() @ inputs.reshape(-1, inputs.shape[-1]), rows.sum(0) if biased else None


class WeightFirstLinear(ReadingLayer, nn.Linear):
    """Linear layer whose weight gradient comes first where that pays."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the outputs, (..., out), of inputs (..., in)."""
        if torch.compiler.is_compiling() or input.dim() < 2:
            return super().forward(input)
        weight, bias = self.weight, self.bias
        reading = self.readings.of(weight)
        rows = input.numel() // max(1, input.shape[-1])
        if reading is None or not pays(call_of(reading, input, weight, 2 * rows * weight.numel())):
            return functional.linear(input, weight, bias)
        return compute(LinearProduct(), input, weight, bias, reading)

    def _get_name(self) -> str:
        return nn.Linear.__name__
