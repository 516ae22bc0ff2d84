"""Local response normalisation over channels (Krizhevsky et al. 2012, section 3.3), with channels last in memory.

    s = k + alpha / n  sum of x x over n channels around        y = x s^-beta

    gradient of x  =  g s^-beta  -  2 alpha beta / n  x  sum over the channels around of  g y / s

PyTorch's goes through a mean over a fifth dimension, there and back. Here the sum is of n shifted rows, a few places at
once, so that they stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unisono.compute.geometry import image, rows

AT_ONCE = 1 << 18
"""Numbers at once."""


@dataclass(frozen=True)
class Constants:
    """As `nn.LocalResponseNorm` names them; `size` is n."""

    size: int
    alpha: float
    beta: float
    k: float


class ResponseNorm(nn.LocalResponseNorm):
    """The same layer, computed so."""

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.ndim != 4 or not inputs.numel():
            return super().forward(inputs)
        constants = Constants(self.size, self.alpha, self.beta, self.k)
        outputs: Tensor = _Normalise.apply(inputs, constants)  # type: ignore[no-untyped-call]
        return outputs


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, constants: Constants) -> Tensor:
        source = rows(inputs)
        ctx.save_for_backward(source)
        ctx.constants = constants
        out = torch.empty_like(source)
        for part, to in _parts(source, out):
            torch.mul(part, _sums(part, constants).pow_(-constants.beta), out=to)
        return image(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (source,) = ctx.saved_tensors
        constants: Constants = ctx.constants
        slope = rows(gradient)
        out = torch.empty_like(source)
        factor = -2 * constants.alpha * constants.beta / constants.size
        for part, given, to in _parts(source, slope, out):
            sums = _sums(part, constants)
            scaled = sums.pow(-constants.beta).mul_(given)
            around = _around(torch.div(scaled, sums, out=sums).mul_(part), constants.size, backward=True)
            torch.addcmul(scaled, part, around, value=factor, out=to)
        return image(out), None


def use_response_norms(model: nn.Module) -> int:
    """Have the model's local response norms computed so; how many there are."""
    layers = [module for module in model.modules() if type(module) is nn.LocalResponseNorm]
    for layer in layers:
        layer.__class__ = ResponseNorm
    return len(layers)


def _sums(part: Tensor, constants: Constants) -> Tensor:
    """S of each number."""
    return _around(part * part, constants.size).mul_(constants.alpha / constants.size).add_(constants.k)


def _around(part: Tensor, size: int, backward: bool = False) -> Tensor:
    """The sum over the `size` channels around each, size // 2 of them before it; `backward`, after it."""
    channels = part.shape[-1]
    before = size // 2 if not backward else size - 1 - size // 2
    wide = torch.nn.functional.pad(part, (before, size - 1 - before))
    sums = wide[..., :channels] + wide[..., 1 : 1 + channels] if size > 1 else wide.clone()
    for shift in range(2, size):
        sums += wide[..., shift : shift + channels]
    return sums


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few places of all, one a row."""
    flat = [tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    each = max(1, AT_ONCE // tensors[0].shape[-1])
    for first in range(0, len(flat[0]), each):
        yield tuple(one[first : first + each] for one in flat)
