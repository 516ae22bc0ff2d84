"""The contract of a wire: it encodes a stretch of numbers into bytes, with scales or whatever else it needs.

stretch   | 0.5  -1.0  0.25 |   ──encode──▶   parcel   | scale 1/127 | 64 -127 32 |   ──decode──▶   stretch
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


class Wire(Protocol):
    """Encodes stretches of a payload of one dtype. A stretch is a flat array, a parcel a flat array of bytes.

    What a rank passes on, it has decoded before: to encode it again must give the same bytes, or ranks would end with
    different numbers. So `encode` after `decode` changes nothing, for a stretch that begins and ends where it did.
    """

    by_element: bool
    """Whether each number is encoded by itself: then it does not matter where a stretch begins and ends. Other wires go
    by schedules that cut a payload in the same way from beginning to end."""

    def nbytes(self, length: int) -> int:
        """Return the bytes that a stretch of `length` elements takes in flight."""

    def encode(self, stretch: Array, parcel: Array) -> None:
        """Fill `parcel`, and put into `stretch` what the other end will decode from it."""

    def decode(self, parcel: Array, stretch: Array) -> None:
        """Fill `stretch` with the numbers that `parcel` holds."""
