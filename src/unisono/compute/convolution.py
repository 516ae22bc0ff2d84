"""Convolutions that follow a plan: a model's own layers, with their three passes computed by the plan's algorithms.

    nn.Conv2d  ─ plan_convolutions ─▶  the same module, parameters and names; its products go through the plan

Layers that a plan cannot compute (other padding than zeros, inputs without a batch dimension) stay PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.geometry import Geometry, Pass
from unisono.plan.layer_plan import COLUMN
from unisono.tensor_parallel.layers import KINDS, ColumnParallelConvolution


class PlannedConvolution(nn.Conv2d):
    """Convolution whose passes follow a plan."""

    plan: ConvolutionPlan

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002  PyTorch's
        inputs = input
        if not plannable(self, inputs.shape):
            unplanned: Tensor = super()._conv_forward(inputs, weight, bias)
            return unplanned
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs, weight = inputs.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        outputs: Tensor = _Convolve.apply(inputs, weight, bias, geometry_of(self, inputs), self.plan)
        return outputs


class PlannedColumnParallelConvolution(ColumnParallelConvolution, PlannedConvolution):
    """Convolution of which each rank has some output channels, and whose passes follow a plan."""


PLANNED: Mapping[type[nn.Module], type[PlannedConvolution]] = {
    nn.Conv2d: PlannedConvolution,
    KINDS[nn.Conv2d, COLUMN]: PlannedColumnParallelConvolution,
}
"""Classes of planned convolutions, by the exact class of the layer."""


def plannable(layer: nn.Conv2d, inputs: Sequence[int]) -> bool:
    """Return True if a plan can compute this layer for inputs of shape `inputs`."""
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return zeros and len(inputs) == 4 and inputs[0] > 0


class _Convolve(torch.autograd.Function):
    """Product of a layer and its gradients, in one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, plan: ConvolutionPlan
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry, ctx.plan = geometry, plan
        # an algorithm may return a view, and a view made here must not be changed in place by the next layer (relu)
        outputs = plan.compute(Pass.FORWARD, geometry, inputs, weight).detach()
        return outputs if bias is None else outputs.add_(bias.view(1, -1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, weight), needed, compute = ctx.saved_tensors, ctx.needs_input_grad, ctx.plan.compute
        of_inputs = compute(Pass.GRAD_INPUT, ctx.geometry, gradient, weight) if needed[0] else None
        of_weight = compute(Pass.GRAD_WEIGHT, ctx.geometry, inputs, gradient) if needed[1] else None
        return of_inputs, of_weight, gradient.sum((0, 2, 3)) if needed[2] else None, None, None


def geometry_of(layer: nn.Conv2d, inputs: Tensor) -> Geometry:
    """Return the geometry of a layer for these inputs, (samples, channels, height, width)."""
    samples, _, height, width = inputs.shape
    assert not isinstance(layer.padding, str), "computed by PyTorch"
    pairs: tuple[tuple[int, ...], ...] = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    kernel, stride, padding, dilation = ((down, right) for down, right in pairs)
    return Geometry(
        samples,
        layer.in_channels,
        len(layer.weight),  # this rank's, where channels are split
        (height, width),
        kernel,
        stride,
        padding,
        dilation,
        layer.groups,
        inputs.dtype,
    )


def plan_convolutions(model: nn.Module, plan: ConvolutionPlan) -> int:
    """Make the model's convolutions follow `plan`. Return their number. Names and parameters stay as they are."""
    layers = [module for module in model.modules() if type(module) in PLANNED]
    for layer in layers:
        layer.__class__ = PLANNED[type(layer)]
        assert isinstance(layer, PlannedConvolution)
        layer.plan = plan
    return len(layers)
