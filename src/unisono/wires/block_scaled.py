"""Integers of 8 or 4 bits for messages, with one scale for each block of 64 numbers.

block    | 0.50  -1.00  0.24  0.00 |          largest magnitude 1.00, int4: scale = 1.00 / 7 as bfloat16 = 0.14258
parcel   scales | 0.14258 |  integers | 4  -7  2  0 |            16 bits a block, 4 bits a number: 4.25 in all
decoded  | 0.570 -0.998 0.285 0.000 |         at most half a scale away

The scale is rounded to the nearest bfloat16, which moves the largest number by less than half a scale: its integer is
always 127 (int8) or 7 (int4). So the decoded block has the same scale again, exactly, and encoding it gives the same
bytes. A block with a number that is not finite, or of which the scale is above 2**120, is decoded as NaN throughout: a
run that diverges shows it. A block whose scale is below 2**-126, the smallest normal number, is decoded as zeros.

Sums are made in the payload's own dtype. Errors of single numbers are large, so gradients need more bits, or error
feedback (`rules/outer.py`). Source: blockwise quantization (Dettmers et al., arXiv:2110.02861), with linear levels.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from unisono.wires.wire import Array

BLOCK = 64
"""Numbers that share a scale."""

NAN_BITS = 0x7FC0
"""NaN as a bfloat16: the first bits of NumPy's NaN."""

STRETCH = 512 * BLOCK
"""Numbers that are converted at once: their intermediate results stay in the processor's cache."""

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**120


class BlockScaled:
    """Wire for payloads of `dtype` (float32 or float64), sent as integers of `bits` bits (8 or 4)."""

    elementwise = False

    def __init__(self, dtype: torch.dtype, bits: int) -> None:
        self.dtype, self.bits = dtype, bits
        self.largest = (1 << (bits - 1)) - 1
        """Largest integer; the smallest is its negative."""

    def nbytes(self, length: int) -> int:
        return 2 * -(-length // BLOCK) + -(-length * self.bits // 8)

    def encode(self, values: Array, encoded: Array) -> None:
        scales, integers = self._parts(encoded, len(values))
        for start in range(0, len(values), STRETCH):
            stretch = values[start : start + STRETCH]
            blocks = _blocks(stretch)
            steps = self._scales(blocks)
            rounded = self._round(blocks, steps)
            bits = torch.from_numpy(steps).bfloat16().view(torch.int16).numpy()
            bits[np.isnan(steps)] = NAN_BITS  # PyTorch's own differ from that of this rank's payload
            scales[start // BLOCK :][: len(steps)] = bits
            self._write(integers, start, rounded.reshape(-1)[: len(stretch)].astype(np.int8))
            stretch[:] = (rounded * steps[:, None]).reshape(-1)[: len(stretch)]

    def decode(self, encoded: Array, values: Array) -> None:
        scales, integers = self._parts(encoded, len(values))
        for start in range(0, len(values), STRETCH):
            stretch = values[start : start + STRETCH]
            sent = scales[start // BLOCK :][: -(-len(stretch) // BLOCK)]
            steps = torch.from_numpy(sent.copy()).view(torch.bfloat16).to(self.dtype).numpy()
            rounded = _blocks(self._read(integers, start, len(stretch)).astype(values.dtype))
            stretch[:] = (rounded * steps[:, None]).reshape(-1)[: len(stretch)]

    def _parts(self, encoded: Array, length: int) -> tuple[Array, Array]:
        count = 2 * -(-length // BLOCK)
        return encoded[:count].view(np.int16), encoded[count:]

    def _scales(self, blocks: Array) -> Array:
        """Return each block's scale: a bfloat16 in the payload's dtype, 0, or NaN."""
        magnitudes = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
        scales = torch.from_numpy(magnitudes / self.largest).bfloat16().to(self.dtype).numpy()
        scales[scales < SMALLEST_SCALE] = 0
        scales[~(scales <= LARGEST_SCALE)] = np.nan
        return scales

    def _round(self, blocks: Array, scales: Array) -> Array:
        """Return the integers of blocks, as numbers of the payload's dtype."""
        usable = scales > 0  # False for NaN
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=usable)
        with np.errstate(invalid="ignore"):  # infinities of blocks that are set to 0
            rounded = np.rint(blocks * factors[:, None])
        rounded[~usable] = 0
        rounded += 0.0  # integers have no -0.0
        clipped: Array = np.clip(rounded, -self.largest, self.largest, out=rounded)
        return clipped

    def _write(self, integers: Array, start: int, numbers: Array) -> None:
        """Write int8 numbers, of which the first is element `start`, with `bits` bits each."""
        if self.bits == 8:
            integers[start : start + len(numbers)] = numbers.view(np.uint8)
            return
        pairs = np.append(numbers, np.int8(0)) if len(numbers) % 2 else numbers
        packed = (pairs[0::2] & 0xF) | (pairs[1::2] << 4)
        integers[start // 2 :][: len(packed)] = packed.view(np.uint8)

    def _read(self, integers: Array, start: int, length: int) -> Array:
        """Return `length` int8 numbers, of which the first is element `start`."""
        if self.bits == 8:
            return integers[start : start + length].view(np.int8)
        packed = integers[start // 2 :][: -(-length // 2)].view(np.int8)
        numbers = np.empty(2 * len(packed), np.int8)
        numbers[0::2], numbers[1::2] = (packed << 4) >> 4, packed >> 4  # shifts to the right keep the sign
        return numbers[:length]


def _blocks(values: Array) -> Array:
    """Return values as rows of a block each; the last is filled up with zeros."""
    missing = -len(values) % BLOCK
    return (np.append(values, np.zeros(missing, values.dtype)) if missing else values).reshape(-1, BLOCK)


int8 = partial(BlockScaled, bits=8)
int4 = partial(BlockScaled, bits=4)
