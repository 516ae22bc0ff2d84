"""Linear layers: outputs = inputs weight^T + bias, with the three products that PyTorch computes."""

from __future__ import annotations

from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional

from unisono.reducer.weight_first.decision import call_of, pays, plain
from unisono.reducer.weight_first.product import compute
from unisono.reducer.weight_first.taken import TakenLayer


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


class WeightFirstLinear(TakenLayer[nn.Linear]):
    """Linear layer whose weight gradient comes first where that pays."""

    replaces = "forward"

    @property
    def weight(self) -> Tensor:
        """Weight of the layer, (out, in)."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """Bias of the layer, (out)."""
        return self.layer.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the outputs, (..., out), of inputs (..., in)."""
        if not is_scripting():
            return self.multiply(input)
        return functional.linear(input, self.weight, self.bias)  # PyTorch's compiler reads it as the layer's own

    def multiply(self, inputs: Tensor) -> Tensor:
        """Return the outputs, with the weight gradient first where that pays; elsewhere those of the layer's class."""
        layer = self.layer
        if type(layer) is nn.Linear and plain(inputs, layer.weight, layer.bias) and inputs.dim() > 1:
            weight, reading = layer.weight, self.readings.of(layer.weight)
            rows = inputs.numel() // max(1, inputs.shape[-1])
            if reading is not None and pays(call_of(reading, inputs, weight, 2 * rows * weight.numel())):
                return compute(LinearProduct(), inputs, weight, layer.bias, reading)
        return type(layer).forward(layer, inputs)
