"""Weight gradient before the input gradient (PCL-DNN section 3.1): an exchange begins one product earlier.

    PyTorch     gradient ─▶ [ input gradient, weight gradient ] ─▶ exchange begins
    here        gradient ─▶ [ weight gradient ] ─▶ exchange begins
                                      └─▶ [ input gradient ] ─▶ layer before

A layer is two nodes of autograd's graph. The node of the weight gradient stands behind that of the input gradient and
passes the gradient on. Autograd accumulates into `.grad`, and runs the hooks on it, before any other node that is
ready, and then the node that was made last: the input gradient of the same layer (`docs/step.md` has what follows).

Worked example, 4 ranks, layers 0 to 2 with weights of n bytes each (i, w: input and weight gradient of a layer):

    PyTorch     i2 w2│i1 w1│w0      exchange of layer 2 begins after 2 products of 5
    here        w2│i2 w1│i1 w0      after 1; each exchange but the last layer's has one product more to hide under

Each rank sends and receives 2 n (p - 1) / p = 1.5 n bytes for each layer, in both orders. An update of a weight waits
until the input gradient has read it (`have_been_read`; task `grad_input` of `step/build.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.nn import functional

Outputs = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Outputs of a layer from its inputs, weight and bias."""

Gradients = Callable[[Tensor, Tensor, Tensor, Sequence[bool]], Sequence[Tensor | None]]
"""Gradients of inputs, weight and bias, where `wanted`, from that of the outputs, inputs, weight and `wanted`."""

_unread = set[int]()
"""Weights, by their ids, whose gradients are accumulated and which an input gradient has still to read."""


def have_been_read(weights: Iterable[Tensor]) -> bool:
    """Return True where no input gradient has still to read one of these weights."""
    return _unread.isdisjoint(map(id, weights))


def forget_unread(weights: Iterable[Tensor]) -> None:
    """Forget what was to be read of these weights: the backward pass has ended, or failed."""
    _unread.difference_update(map(id, weights))


def compute_weight_gradients_first(model: nn.Module) -> int:
    """Make the model's layers that are exactly `nn.Linear` or `nn.Conv1d` to `nn.Conv3d` compute their weight gradients
    first. Return their number. Names and parameters stay as they are, outputs and gradients have PyTorch's bits.

    Call it after `unisono.parallel` or `Trainer`, which split layers by their class; split layers keep their order.
    """
    layers = [module for module in model.modules() if type(module) in KINDS]
    for layer in layers:
        layer.__class__ = KINDS[type(layer)]
    return len(layers)


class WeightFirstLinear(nn.Linear):
    """Linear layer whose weight gradient comes first."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the outputs, (..., out), of inputs (..., in)."""
        if separable(input, self.weight, self.bias) and input.dim() > 1:
            return compute(functional.linear, linear_gradients, input, self.weight, self.bias)
        return super().forward(input)


class WeightFirstConvolution(nn.modules.conv._ConvNd):
    """Convolution whose weight gradient comes first where it adds its own zeros, as many on both sides."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002  PyTorch's
        zeros = self.padding_mode == "zeros" and not isinstance(self.padding, str)
        if zeros and separable(input, weight, bias) and input.dim() == weight.dim() and input.numel():
            options: Sequence[Any] = self.stride, self.padding, self.dilation, False, self.output_padding, self.groups
            gradients = partial(convolution_gradients, options)
            return compute(lambda x, w, b: torch.convolution(x, w, b, *options), gradients, input, weight, bias)
        return super()._conv_forward(input, weight, bias)


class WeightFirstConv1d(WeightFirstConvolution, nn.Conv1d):
    """Convolution over (b, channels, length)."""


class WeightFirstConv2d(WeightFirstConvolution, nn.Conv2d):
    """Convolution over (b, channels, height, width)."""


class WeightFirstConv3d(WeightFirstConvolution, nn.Conv3d):
    """Convolution over (b, channels, depth, height, width)."""


KINDS: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: WeightFirstLinear,
    nn.Conv1d: WeightFirstConv1d,
    nn.Conv2d: WeightFirstConv2d,
    nn.Conv3d: WeightFirstConv3d,
}
"""Classes of layers that compute the weight gradient first, by the exact class of the layer."""


def separable(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True where autograd records both gradients of plain real tensors, and nothing watches or changes the
    layer's operations: autocast, modes (selective checkpointing), transforms, tracing, compilation, other classes."""
    given = (inputs, weight) if bias is None else (inputs, weight, bias)
    if torch.compiler.is_compiling() or any(type(tensor) not in (Tensor, nn.Parameter) for tensor in given):
        return False
    if any(tensor.is_complex() or tensor.is_nested or tensor.layout is not torch.strided for tensor in given):
        return False
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    traced = torch._C._get_tracing_state() is not None
    if modes or transformed or traced or torch.is_autocast_enabled(inputs.device.type):
        return False
    return torch.is_grad_enabled() and inputs.requires_grad and weight.requires_grad and weight.is_leaf


def linear_gradients(
    gradient: Tensor, inputs: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients of inputs (..., in), weight (out, in) and bias (out)."""
    rows, flat = gradient.flatten(0, -2), inputs.flatten(0, -2)
    grad_input = grad_bias = None
    if wanted[0]:  # PyTorch multiplies the other way round for inputs in columns: its sums have another order there
        in_columns = flat.stride() == (1, len(flat))
        grad_input = (weight.t() @ rows.t()).t() if in_columns else rows @ weight
        grad_input = grad_input if inputs.dim() == 2 else grad_input.reshape(inputs.shape)
    if wanted[2]:
        grad_bias = rows.sum(0)
    return grad_input, rows.t() @ flat if wanted[1] else None, grad_bias


def convolution_gradients(
    options: Sequence[Any], gradient: Tensor, inputs: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients of inputs (b, in, ...), weight (out, in / groups, ...) and bias (out)."""
    backward: Callable[..., Sequence[Tensor | None]] = torch.ops.aten.convolution_backward
    return backward(gradient, inputs, weight, (len(weight),), *options, wanted)


def compute(outputs: Outputs, gradients: Gradients, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the outputs of a layer whose weight gradient comes first."""
    made = _GradInput.apply(inputs, (weight, bias), outputs, gradients)
    outcome: Tensor = _GradWeight.apply(made, weight, bias, (inputs,), gradients)
    return outcome


class _GradInput(Function):
    """Outputs as a function of the inputs. The weight comes in a tuple, so that this node has no edge to it, for which
    its accumulation would wait. It is saved all the same, with its version: one that has changed raises an error."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight_and_bias: tuple[Tensor, Tensor | None], outputs: Outputs, gradients: Gradients
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight_and_bias[0])
        ctx.gradients, ctx.weight = gradients, id(weight_and_bias[0])
        # the outputs may be a view, and a view made here must not be changed in place by the next layer (relu)
        return outputs(inputs, *weight_and_bias).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_inputs = ctx.gradients(gradient, *ctx.saved_tensors, (True, False, False))[0]
        _unread.discard(ctx.weight)
        return of_inputs, None, None, None


class _GradWeight(Function):
    """The same outputs as a function of the weight and the bias. The inputs come in a tuple: without an edge."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,  # noqa: ARG004  its edge is all that is needed
        inputs: tuple[Tensor],
        gradients: Gradients,
    ) -> Tensor:
        ctx.mark_dirty(outputs)  # the same tensor, without a copy
        ctx.save_for_backward(*inputs, weight)
        ctx.gradients, ctx.weight = gradients, id(weight)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _unread.add(ctx.weight)
        _, grad_weight, grad_bias = ctx.gradients(gradient, *ctx.saved_tensors, (False, True, ctx.needs_input_grad[2]))
        return gradient, grad_weight, grad_bias, None, None
