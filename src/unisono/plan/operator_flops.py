"""FLOPs of an operator of PyTorch: matrix products and convolutions, 2 for each multiply-add.

    (m, k) @ (k, n)              2 m k n                                  a batch of them: as many times
    convolution                  2 outputs * weights / output channels    in 1 to 3 dimensions, groups, transposed:
                                                                          2 inputs * weights / input channels
    its two gradients            that of the forward pass, each, if it is asked for

Worked example: 64 channels of 56 x 56 to 128, 3x3, in 2 groups, one sample. The weights are (128, 32, 3, 3), an output
needs 32 * 9 = 288 multiply-adds: 2 * 128 * 56 * 56 * 288 = 231 million.

All other operators count nothing: their time is that of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def operator_flops(operator: Any, args: tuple[Any, ...], outputs: Any) -> int:
    """Return the FLOPs of a call of an operator of `torch.ops`, given its arguments and what it returned."""
    count = COUNTS.get(getattr(operator, "overloadpacket", operator))
    return count(args, outputs) if count else 0


def _product(first: Tensor, second: Tensor) -> int:
    """Return the FLOPs of (..., m, k) @ (..., k, n)."""
    return 2 * first.numel() * second.shape[-1]


def _convolution(weight: Tensor, inputs: Tensor, outputs: Tensor, transposed: bool) -> int:
    """Return the FLOPs of a forward pass. A weight is used once for each output, or input if transposed."""
    per_number = prod(weight.shape[1:])
    return 2 * (inputs if transposed else outputs).numel() * per_number


def _forward(args: tuple[Any, ...], outputs: Any) -> int:
    inputs, weight, _, _, _, _, transposed = args[:7]
    return _convolution(weight, inputs, outputs, transposed)


def _backward(args: tuple[Any, ...], outputs: Any) -> int:
    gradient, inputs, weight, _, _, _, _, transposed = args[:8]
    grad_input, grad_weight = (one is not None for one in outputs[:2])
    return (grad_input + grad_weight) * _convolution(weight, inputs, gradient, transposed)


COUNTS: Mapping[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.mm: lambda args, _: _product(args[0], args[1]),
    aten.bmm: lambda args, _: _product(args[0], args[1]),
    aten.mv: lambda args, _: 2 * int(args[0].numel()),
    aten.dot: lambda args, _: 2 * int(args[0].numel()),
    aten.addmm: lambda args, _: _product(args[1], args[2]),
    aten.baddbmm: lambda args, _: _product(args[1], args[2]),
    aten.convolution: _forward,
    aten.convolution_backward: _backward,
}
"""Operators that make products; all others of PyTorch that do are made of these on the meta device."""
