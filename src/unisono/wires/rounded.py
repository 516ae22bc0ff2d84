"""Narrower floating-point formats for messages: sent numbers are rounded, received ones are widened, then summed.

A rank keeps the rounded numbers that it has sent; otherwise the owner of a finished sum would keep other bits than all
other ranks. Sums are made in the payload's own format, so a wire of half the bits costs two roundings for `direct`
(Theano-MPI section 3.2, ASA16) and one for each hop of a ring. float16 has no number above 65,504: larger sums become
infinite. bfloat16 has the range of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from unisono.wires.wire import Array

BLOCK_LENGTH = 1 << 15
"""Elements converted at once. PyTorch would distribute more over threads that the backward pass needs."""


class Rounded:
    """Wire for payloads of `dtype`, sent as `wire_dtype`, which has fewer bits."""

    elementwise = True

    def __init__(self, dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
        self.dtype, self.wire_dtype = dtype, wire_dtype

    def nbytes(self, length: int) -> int:
        return length * self.wire_dtype.itemsize

    def encode(self, values: Array, encoded: Array) -> None:
        for held, sent in self._blocks(values, encoded):
            held.copy_(sent.copy_(held))

    def decode(self, encoded: Array, values: Array) -> None:
        for held, sent in self._blocks(values, encoded):
            held.copy_(sent)

    def _blocks(self, values: Array, encoded: Array) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        same_size = np.dtype(f"int{8 * self.wire_dtype.itemsize}")  # PyTorch views no empty bytes as anything wider
        sent = torch.from_numpy(encoded.view(same_size)).view(self.wire_dtype)
        held = torch.from_numpy(values)
        return zip(held.split(BLOCK_LENGTH), sent.split(BLOCK_LENGTH), strict=True)  # type: ignore[no-untyped-call]


def rounded(wire_dtype: torch.dtype, dtype: torch.dtype) -> Rounded | None:
    """Return the wire of `dtype` as `wire_dtype`; None for a dtype that is not wider."""
    return Rounded(dtype, wire_dtype) if dtype.itemsize > wire_dtype.itemsize else None


float32 = partial(rounded, torch.float32)
float16 = partial(rounded, torch.float16)
bfloat16 = partial(rounded, torch.bfloat16)


def exact(_: torch.dtype) -> None:
    """Return None: the integers of exact sums are sent as they are."""
