"""Local response normalisation over channels (Krizhevsky et al. 2012, section 3.3), with channels last in memory.

    s = k + alpha / n  sum of x x over n channels around        y = x s^-beta

    gradient of x  =  g s^-beta  -  2 alpha beta / n  x  sum over the channels around of  g y / s

PyTorch takes a mean over a fifth dimension, forward and backward. Here rows lie in one line with zeros between them;
the line is added to itself, shifted; a few pixels at a time, so that they stay in the cache:

    squares            0 0 a b c 0 0  0 0 d e f 0 0           3 channels of 2 places, n = 5
    pairs of them      of the line and the line shifted by 1
    fours of them      of the pairs and the pairs shifted by 2
    sums of five       of the line and the fours shifted by 1: 3 additions for all, where one by one they are 4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unisono.compute.geometry import image, rows

AT_ONCE = 1 << 18
"""Number of elements processed at a time."""


@dataclass(frozen=True)
class Constants:
    """Constants of the norm, named as in `nn.LocalResponseNorm`; `size` is n."""

    size: int
    alpha: float
    beta: float
    k: float


class ResponseNorm(nn.LocalResponseNorm):
    """The same layer as its base class, computed as described above."""

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
        around = _Around(source, constants.size, constants.size // 2)
        for part, to in _parts(source, out):
            sums = _sums(around, part, constants)
            torch.mul(part, around.lines(_power(sums, constants.beta)), out=to)
        return image(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (source,) = ctx.saved_tensors
        constants: Constants = ctx.constants
        slope = rows(gradient)
        out = torch.empty_like(source)
        factor = -2 * constants.alpha * constants.beta / constants.size
        before = constants.size // 2
        around, turned = (_Around(source, constants.size, one) for one in (before, constants.size - 1 - before))
        for part, given, to in _parts(source, slope, out):
            sums = _sums(around, part, constants)
            scaled = around.lines(_power(sums, constants.beta)) * given
            shares = turned.of_product(scaled / around.lines(sums), part)
            torch.addcmul(scaled, part, turned.lines(shares), value=factor, out=to)
        return image(out), None


def use_response_norms(model: nn.Module) -> int:
    """Make the model's local response norms use ResponseNorm. Return their number."""
    layers = [module for module in model.modules() if type(module) is nn.LocalResponseNorm]
    for layer in layers:
        layer.__class__ = ResponseNorm
    return len(layers)


class _Around:
    """Sums over the `size` channels around each channel, `before` of them before it, for a few pixels at a time."""

    def __init__(self, like: Tensor, size: int, before: int) -> None:
        self._size, self._before, self._channels = size, before, like.shape[-1]
        self._wide = like.new_zeros(_at_once(like), self._channels + size - 1)

    def of_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sums of `left` times `right`, (places, channels), in one line with others between them."""
        wide = self._wide[: len(left)]
        torch.mul(left, right, out=wide[:, self._before : self._before + self._channels])
        line = wide.view(-1)
        count, found, start = len(line) - self._size + 1, list[Tensor](), 0
        for width in (1 << bit for bit in range(self._size.bit_length())):
            if width > 1:
                line = line[: -(width // 2)] + line[width // 2 :]
            if self._size & width:
                found.append(line[start : start + count])
                start += width
        return reduce(torch.add, found)

    def lines(self, line: Tensor) -> Tensor:
        """Return a line without the sums in between: (places, channels)."""
        step = self._wide.shape[1]
        return line.as_strided(((len(line) + self._size - 1) // step, self._channels), (step, 1))


def _sums(around: _Around, part: Tensor, constants: Constants) -> Tensor:
    """Return s for each element, in one line."""
    squares = around.of_product(part, part)
    return torch.add(squares.new_tensor(constants.k), squares, alpha=constants.alpha / constants.size)


def _power(sums: Tensor, beta: float) -> Tensor:
    """Return the sums to the power -beta; for 0.75 by roots, which take a fifth of the time of a power."""
    if beta != 0.75:
        return sums.pow(-beta)
    root = sums.rsqrt()
    return root * root.sqrt()


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same few pixels of all tensors, one pixel a row."""
    flat = [tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    each = _at_once(tensors[0])
    for first in range(0, len(flat[0]), each):
        yield tuple(one[first : first + each] for one in flat)


def _at_once(tensor: Tensor) -> int:
    """Return the number of pixels processed at a time."""
    return max(1, min(AT_ONCE, tensor.numel()) // tensor.shape[-1])
