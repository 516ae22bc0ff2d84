"""Product of a layer whose weight gradient is computed before its input gradient, as two nodes of autograd's graph.

    PyTorch     gradient ─▶ [ input gradient, weight gradient ] ─▶ exchange begins
    here        gradient ─▶ [ weight gradient ] ─▶ exchange begins
                                      └─▶ [ input gradient ] ─▶ layer before

The node of the weight gradient stands behind that of the input gradient and passes the gradient on. Autograd runs the
accumulation into `.grad`, and the hooks on it, before any other node that is ready. So `.grad`, its hooks, weights that
are used several times, accumulation and `torch.autograd.grad` are autograd's own, whatever the order.

Worked example, 4 ranks, layers 0 to 2 with weights of n bytes each (i, w: input and weight gradient of a layer):

    PyTorch     i2 w2│i1 w1│w0      exchange of layer 2 begins after 2 products of 5
    here        w2│i2 w1│i1 w0      after 1; each exchange but the last layer's has one product more to hide under

Each rank sends and receives 2 n (p - 1) / p = 1.5 n bytes for each layer, in both orders. An update of the weights has
to wait for the input gradient, which reads them (`readings.py`, `step/build.py`).

Source: Das et al., Distributed Deep Learning Using Synchronous Stochastic Gradient Descent, section 3.1.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function

from unisono.reducer.weight_first.readings import Reading


class Product(Protocol):
    """Product of inputs with a weight, and its gradients; each in operations that can be differentiated again."""

    def outputs(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's outputs, in memory of their own."""

    def grad_input(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the inputs from that of the outputs."""

    def grad_weight(
        self, gradient: Tensor, inputs: Tensor, weight: Tensor, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the weight and, if `biased`, of the bias from that of the outputs."""


def compute(product: Product, inputs: Tensor, weight: Tensor, bias: Tensor | None, reading: Reading) -> Tensor:
    """Return the outputs of a layer whose weight gradient comes first; `reading` is that of its weight."""
    outputs = _GradInput.apply(inputs, (weight, bias), product, reading)
    found: Tensor = _GradWeight.apply(outputs, weight, bias, (inputs,), product, reading)
    return found


class _GradInput(Function):
    """Outputs of a layer, as a function of its inputs.

    The weight comes in a tuple, so that this node has no edge to it: its accumulation would wait for this node. It is
    saved all the same, with its version, and a second differentiation goes through it.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, others: tuple[Tensor, Tensor | None], product: Product, reading: Reading
    ) -> Tensor:
        weight, bias = others
        ctx.save_for_backward(inputs, weight)
        ctx.product, ctx.reading = product, reading
        # the outputs may be a view, and a view made here must not be changed in place by the next layer (relu)
        return product.outputs(inputs, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        found = ctx.product.grad_input(gradient, inputs, weight)
        ctx.reading.end()
        return found, None, None, None


class _GradWeight(Function):
    """The same outputs, as a function of the layer's weight and bias. The inputs come in a tuple: without an edge."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,  # noqa: ARG004  its edge is all that is needed
        others: tuple[Tensor],
        product: Product,
        reading: Reading,
    ) -> Tensor:
        ctx.mark_dirty(outputs)  # the same tensor, without a copy
        ctx.save_for_backward(*others, weight)
        ctx.product, ctx.reading = product, reading
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        ctx.reading.begin()
        own = ctx.product.grad_weight(gradient, inputs, weight, ctx.needs_input_grad[2])
        return gradient, *own, None, None, None
