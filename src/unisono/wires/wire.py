"""Interface of a wire, which encodes a stretch of numbers into bytes, with any additional data such as scales.

stretch   | 0.5  -1.0  0.25 |   ──encode──▶   parcel   | scale 1/127 | 64 -127 32 |   ──decode──▶   stretch
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


class Wire(Protocol):
    """Encoding of stretches of a payload of one dtype. A stretch is a flat array, a parcel a flat array of bytes.

    A rank may forward numbers that it has decoded. Encoding them again must give the same bytes, or ranks would end
    with different numbers. So `encode` after `decode` changes nothing for a stretch with the same beginning and end.
    """

    elementwise: bool
    """True if each number is encoded independently: the limits of a stretch then do not matter. Other wires need
    schedules that cut a payload in the same way in all rounds."""

    def nbytes(self, length: int) -> int:
        """Return the encoded size in bytes of a stretch of `length` elements."""

    def encode(self, values: Array, encoded: Array) -> None:
        """Encode `values` into `encoded`, and set `values` to the numbers that the other end will decode."""

    def decode(self, encoded: Array, values: Array) -> None:
        """Decode the numbers in `encoded` into `values`."""
