"""The number format in flight: what is sent is rounded to it, what arrives is widened before it is summed.

    float32 payload    1.2345678  ──pack──▶  1.234 (16 bits)  ═══ network ═══▶  1.234  ──unpack──▶  float32, summed
                       1.234      ◀─ the sender keeps what it sent

A rank holds what it has sent: otherwise the owner of a finished sum would keep bits that nobody else has. Sums are made
in the payload's own format, so a wire of half the bits costs two roundings for `direct` (Theano-MPI section 3.2, ASA16)
and one for each hop of a ring. float16 has no number above 65,504: larger sums become infinite;
bfloat16 has float32's range.
"""

from __future__ import annotations

import numpy as np
import torch

from unisono.errors import TensorError
from unisono.transports.arithmetic import Array

WIRES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The formats that a wire may have."""


BLOCK = 1 << 15
"""Elements that are converted at once. PyTorch would share more out to threads that the backward pass needs."""


class Wire:
    """Packs stretches of a payload of `dtype` for the way, unpacks what arrives. A parcel is a flat array of bytes."""

    def __init__(self, dtype: torch.dtype, flight: torch.dtype) -> None:
        self.dtype, self.flight = dtype, flight

    def nbytes(self, length: int) -> int:
        """Bytes that `length` elements take in flight."""
        return length * self.flight.itemsize

    def pack(self, part: Array, parcel: Array) -> None:
        """Round `part` in place, and put it into `parcel`."""
        held, sent = torch.from_numpy(part), self._numbers(parcel)
        for start in range(0, len(held), BLOCK):
            block = slice(start, start + BLOCK)
            rounded = sent[block].copy_(held[block])
            held[block].copy_(rounded)

    def unpack(self, parcel: Array, part: Array) -> None:
        """Widen what is in `parcel` into `part`."""
        held, sent = torch.from_numpy(part), self._numbers(parcel)
        for start in range(0, len(held), BLOCK):
            block = slice(start, start + BLOCK)
            held[block].copy_(sent[block])

    def _numbers(self, parcel: Array) -> torch.Tensor:
        same_size = np.dtype(f"int{8 * self.flight.itemsize}")  # PyTorch views no empty bytes as anything wider
        return torch.from_numpy(parcel.view(same_size)).view(self.flight)


def wire_of(name: str | None, dtype: torch.dtype) -> Wire | None:
    """The wire of that name for tensors of `dtype`; None where they travel as they are.

    Tensors that are no wider than the wire, and those that are not floating point, travel as they are.
    Raises TensorError, listing the names, for an unknown name.
    """
    if name is None:
        return None
    if name not in WIRES:
        raise TensorError(f"there is no wire {name!r}; there are {', '.join(WIRES)}")
    flight = WIRES[name]
    return Wire(dtype, flight) if dtype.is_floating_point and dtype.itemsize > flight.itemsize else None
