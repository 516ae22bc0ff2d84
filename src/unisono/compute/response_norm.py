"""Local response normalisation over channels (Krizhevsky et al. 2012, section 3.3), with channels last in memory.

    s = k + alpha / n  sum of x x over n channels around        y = x s^-beta

    gradient of x  =  g s^-beta  -  2 alpha beta / n  x  sum over the channels around of  g y / s

PyTorch takes a mean over a fifth dimension, forward and backward. Here the pixels lie one after the other in a vector,
with zeros between them. The vector is added to itself, shifted; a few pixels at a time, which fit the cache:

    squares            0 0 a b c 0 0  0 0 d e f 0 0           3 channels of 2 pixels, n = 5
    sums of two        of the vector and the vector shifted by 1
    sums of four       of the sums of two and these shifted by 2
    sums of five       of the vector and the sums of four shifted by 1: 3 additions, where one by one they are 4

Numbers of 16 bits are computed as float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unisono.compute.geometry import to_nchw, to_nhwc

ELEMENTS_PER_BLOCK = 1 << 18
"""Number of elements processed together."""


class ResponseNorm(nn.LocalResponseNorm):
    """The same layer as its base class, computed as described above."""

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.ndim != 4 or not inputs.numel():
            return super().forward(inputs)
        outputs: Tensor = _Normalise.apply(inputs, self)
        return outputs


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, norm: nn.LocalResponseNorm) -> Tensor:
        source = to_nhwc(inputs)
        ctx.save_for_backward(source)
        ctx.norm = norm
        out = torch.empty_like(source)
        windows = _ChannelWindows(source, norm.size, norm.size // 2)
        for rows, to in _parts(source, out):
            part = rows.to(windows.dtype)
            sums = _sums(windows, part, norm)
            torch.mul(part, windows.pixels(_power(sums, norm.beta)), out=to)
        return to_nchw(out).detach()  # no view: the next layer may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (source,) = ctx.saved_tensors
        norm: nn.LocalResponseNorm = ctx.norm
        slope = to_nhwc(gradient)
        out = torch.empty_like(source)
        factor = -2 * norm.alpha * norm.beta / norm.size
        before = norm.size // 2
        windows = _ChannelWindows(source, norm.size, before)
        mirrored = _ChannelWindows(source, norm.size, norm.size - 1 - before)
        for rows, given, to in _parts(source, slope, out):
            part = rows.to(windows.dtype)
            sums = _sums(windows, part, norm)
            scaled = windows.pixels(_power(sums, norm.beta)) * given
            shares = mirrored.of_product(scaled / windows.pixels(sums), part)
            to.copy_(torch.addcmul(scaled, part, mirrored.pixels(shares), value=factor))
        return to_nchw(out), None


def use_response_norms(model: nn.Module) -> int:
    """Make the model's local response norms use ResponseNorm. Return their number."""
    layers = [module for module in model.modules() if type(module) is nn.LocalResponseNorm]
    for layer in layers:
        layer.__class__ = ResponseNorm
    return len(layers)


class _ChannelWindows:
    """Sums over a window of `size` channels around each channel, `before` of them before it, a few pixels at a time."""

    def __init__(self, like: Tensor, size: int, before: int) -> None:
        self._size, self._before, self._channels = size, before, like.shape[-1]
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self._wide = like.new_zeros(_block_pixels(like), self._channels + size - 1, dtype=self.dtype)

    def of_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sums of `left` times `right`, (pixels, channels), as a vector with more sums between pixels."""
        wide = self._wide[: len(left)]
        torch.mul(left, right, out=wide[:, self._before : self._before + self._channels])
        vector = wide.view(-1)
        count, parts, start = len(vector) - self._size + 1, list[Tensor](), 0
        for width in (1 << bit for bit in range(self._size.bit_length())):
            if width > 1:
                vector = vector[: -(width // 2)] + vector[width // 2 :]
            if self._size & width:
                parts.append(vector[start : start + count])
                start += width
        return reduce(torch.add, parts)

    def pixels(self, vector: Tensor) -> Tensor:
        """Return a vector without the sums between the pixels: (pixels, channels)."""
        step = self._wide.shape[1]
        return vector.as_strided(((len(vector) + self._size - 1) // step, self._channels), (step, 1))


def _sums(windows: _ChannelWindows, part: Tensor, norm: nn.LocalResponseNorm) -> Tensor:
    """Return s for each element, as a vector."""
    squares = windows.of_product(part, part)
    return torch.add(squares.new_tensor(norm.k), squares, alpha=norm.alpha / norm.size)


def _power(sums: Tensor, beta: float) -> Tensor:
    """Return the sums to the power -beta; for 0.75 by roots, which take a fifth of the time of a power."""
    if beta != 0.75:
        return sums.pow(-beta)
    root = sums.rsqrt()
    return root * root.sqrt()


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same few pixels of all tensors, one pixel per row."""
    each = _block_pixels(tensors[0])
    yield from zip(*(torch.split(tensor.view(-1, tensor.shape[-1]), each) for tensor in tensors), strict=True)


def _block_pixels(tensor: Tensor) -> int:
    """Return the number of pixels processed at a time."""
    return max(1, min(ELEMENTS_PER_BLOCK, tensor.numel()) // tensor.shape[-1])
