"""Both passes of a layer as one function of autograd: sliced, with their exchanges beside their products.

    forward     rows of x ─▶ play_pass ─▶ rows of y                        saved: what the products took, the weight
    backward    rows of y's gradient ─▶ play_pass ─▶ rows of x's gradient  whole: gradients of the weight and the bias

`Products` are those of a kind of layer, on rows: a row of a linear layer is its features, (in,), one of a convolution
is a sample, (channels, ...). Leading dimensions are rows too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.tensor_parallel.overlap.flows import Flow, Flows
from unisono.tensor_parallel.overlap.passes import play_pass
from unisono.tensor_parallel.overlap.slices import SliceLimits, number_of_slices
from unisono.world import World


class Products(Protocol):
    """Products of a layer on this rank, outside autograd. Results have memory of their own."""

    @property
    def row_dims(self) -> int:
        """Number of dimensions of a row, of which the first is that of the parts."""

    def outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs of the rows `x`."""

    def grad_input(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of rows of this `shape` from that of their outputs."""

    def grad_weight(self, gradient: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of a weight of this `shape`."""


@dataclass(frozen=True)
class LayerPasses:
    """Exchanges and slices of both passes of a layer."""

    flows: Flows
    forward_slices: int
    backward_slices: int

    @property
    def sliced(self) -> bool:
        """True where a pass has several slices."""
        return max(self.forward_slices, self.backward_slices) > 1


def plan_passes(
    flows: Flows, rows: int, input_bytes: int, output_bytes: int, nodes: int, limits: SliceLimits
) -> LayerPasses:
    """Return the passes of a layer over `nodes` nodes, whose whole input and output have so many rows and bytes."""

    def slices(flow: Flow, taken: int, given: int) -> int:
        exchanged = max(0 if flow.take is None else taken, 0 if flow.give is None else given)
        return number_of_slices(rows, exchanged, nodes, limits)

    return LayerPasses(
        flows, slices(flows.forward, input_bytes, output_bytes), slices(flows.backward, output_bytes, input_bytes)
    )


def apply_sliced(
    products: Products,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    passes: LayerPasses,
    group: World,
) -> Tensor:
    """Return the layer's output for an input: each whole, or this rank's part, as the flows say.

    The bias is added to the products of this rank. Autocast converts as it does for PyTorch's layers. Gradients of
    gradients are refused by autograd. Called by all ranks of the group together.
    """
    bias = None if bias is None else _autocasted(bias)
    y: Tensor = _SlicedLayer.apply(_autocasted(x), _autocasted(weight), bias, products, passes, group)
    return y


def _autocasted(x: Tensor) -> Tensor:
    """Return a tensor in autocast's dtype where it is enabled; float64 stays, as in PyTorch."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype is not torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


class _SlicedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        passes: LayerPasses,
        group: World,
    ) -> Tensor:
        ctx.shapes, ctx.products, ctx.passes = (x.shape, weight.shape), products, passes
        ctx.group = group
        done = play_pass(
            passes.flows.forward,
            _rows(x, products),
            passes.forward_slices,
            group,
            lambda rows: products.outputs(rows, weight, bias),
            dim=-products.row_dims,
        )
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(done.taken if needs_weight else None, weight if needs_x else None)
        assert done.given is not None
        # a view made here must not be changed in place by the next layer (relu)
        return done.given.view(*x.shape[: -products.row_dims], *done.given.shape[1:]).detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        products, (shape, weight_shape) = ctx.products, ctx.shapes
        found: dict[str, Tensor] = {}

        def product(rows: Tensor) -> Tensor:
            own: Tensor = products.grad_input(rows, weight, torch.Size((len(rows), *shape[-products.row_dims :])))
            return own

        def whole(rows: Tensor) -> None:
            if needs_weight:
                found["weight"] = products.grad_weight(rows, x, weight_shape)
            if needs_bias:
                dim = rows.ndim - products.row_dims
                found["bias"] = rows.sum([one for one in range(rows.ndim) if one != dim])

        done = play_pass(
            ctx.passes.flows.backward,
            _rows(gradient, products),
            ctx.passes.backward_slices,
            ctx.group,
            product if needs_x else None,
            whole if needs_weight or needs_bias else None,
            dim=-products.row_dims,
        )
        given = None if done.given is None else done.given.view(shape)
        return given, found.get("weight"), found.get("bias"), None, None, None


def _rows(x: Tensor, products: Products) -> Tensor:
    """Return an activation as rows."""
    return x.reshape(-1, *x.shape[x.ndim - products.row_dims :])
