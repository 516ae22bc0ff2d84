"""Bytes and FLOPs of a convolution's seven loops, with nothing and with everything in cache: PCL-DNN section 2.2.

A pass (forward, gradient of the input, gradient of the weights) loops over samples n, input channels i, output
channels o, output rows h and columns w, and the kernel kh x kw. Each turn multiplies and adds: 2 FLOPs.

    n ─ i ─ o ─┬─ h ─ w ─ kh ─ kw      the loops from h on, once for each n, i, o, read
               │                         h w outputs + ih iw inputs + kh kw weights,    ih = h s + kh - 1, iw likewise
               └ nothing stays in cache between two turns of n, i, o

    unblocked    B/F = size (h w + ih iw + kh kw) / (2 kh kw h w)
    in cache     B/F = size (n o h w + n i ih iw + i o kh kw) / (2 n i o kh kw h w)        each number is read once

Worked example, OverFeat-FAST's C5: 12x12 outputs, 3x3, 512 to 1,024 channels, float32, stride s = 1:

    unblocked    4 (144 + 196 + 9) / (2 * 9 * 144)               = 0.539
    in cache     4 (147,456 + 100,352 + 4,718,592) / 1.36e9      = 0.0146 for 1 sample
                 4 (256 * 247,808 + 4,718,592) / (256 * 1.36e9)  = 0.0008 for 256

The section prints 0.54 and 0.003. Its equation gives 0.003 at 6 samples, which it does not name.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from unisono.errors import UsageError

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ConvolutionLoops:
    """Sizes of a convolution without groups. A fully connected layer has outputs and a kernel of 1 x 1."""

    in_channels: int
    out_channels: int
    outputs: tuple[int, int] = (1, 1)
    """Rows and columns of an output feature map."""
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError for a size below 1."""
        for name, sizes in vars(self).items():
            if min(sizes if isinstance(sizes, tuple) else (sizes,)) < 1:
                raise UsageError(f"{name} is {sizes}; a convolution's sizes are 1 or more")

    @property
    def inputs(self) -> tuple[int, int]:
        """Rows and columns of an input feature map with its border, by the paper's h s + kh - 1."""
        down, right = (size * self.stride + kernel - 1 for size, kernel in zip(self.outputs, self.kernel, strict=True))
        return down, right

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.in_channels * self.out_channels * prod(self.kernel)

    def flops(self, samples: float = 1) -> float:
        """Return the FLOPs of one pass."""
        return 2 * samples * self.weights * prod(self.outputs)


def unblocked_bytes_per_flop(loops: ConvolutionLoops, size: int = FLOAT32_BYTES) -> float:
    """Return the bytes from memory for each FLOP where nothing stays in cache; a number has `size` bytes.

    >>> round(unblocked_bytes_per_flop(ConvolutionLoops(512, 1024, (12, 12), (3, 3))), 3)
    0.539
    """
    outputs, kernel = prod(loops.outputs), prod(loops.kernel)
    return size * (outputs + prod(loops.inputs) + kernel) / (2 * kernel * outputs)


def cached_bytes_per_flop(loops: ConvolutionLoops, samples: int, size: int = FLOAT32_BYTES) -> float:
    """Return the bytes from memory for each FLOP where all inputs, outputs and weights stay in cache: the least.

    >>> round(cached_bytes_per_flop(ConvolutionLoops(512, 1024, (12, 12), (3, 3)), 256), 4)
    0.0008
    """
    activations = loops.out_channels * prod(loops.outputs) + loops.in_channels * prod(loops.inputs)
    return size * (samples * activations + loops.weights) / loops.flops(samples)
