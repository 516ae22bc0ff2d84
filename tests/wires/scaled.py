"""A wire of one's own: 8-bit integers, with a scale for each block of numbers."""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 64


class Scaled:
    """float32 as 8-bit integers times a power of two, which is the block's: one byte a number, four a block."""

    by_element = False

    def nbytes(self, length: int) -> int:
        return length + 4 * -(-length // BLOCK)

    def encode(self, stretch: np.ndarray, parcel: np.ndarray) -> None:
        scales, numbers = self._parts(parcel, len(stretch))
        for place, block in enumerate(self._blocks(stretch)):
            largest = float(np.abs(block).max(initial=0))
            scales[place] = 2.0 ** np.ceil(np.log2(largest / 127)) if largest else 0.0
        self._blocks(numbers, np.round(self._over(stretch, scales)))
        self.decode(parcel, stretch)

    def decode(self, parcel: np.ndarray, stretch: np.ndarray) -> None:
        scales, numbers = self._parts(parcel, len(stretch))
        stretch[:] = numbers * np.repeat(scales, BLOCK)[: len(stretch)]

    def _over(self, stretch: np.ndarray, scales: np.ndarray) -> np.ndarray:
        each = np.repeat(scales, BLOCK)[: len(stretch)]
        return np.divide(stretch, each, out=np.zeros_like(stretch), where=each > 0)

    def _parts(self, parcel: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        count = 4 * -(-length // BLOCK)
        return parcel[:count].view(np.float32), parcel[count:].view(np.int8)

    def _blocks(self, stretch: np.ndarray, values: np.ndarray | None = None) -> list[np.ndarray]:
        if values is not None:
            stretch[:] = values
        return [stretch[start : start + BLOCK] for start in range(0, len(stretch), BLOCK)]


def scaled(dtype: torch.dtype) -> Scaled | None:
    return Scaled() if dtype is torch.float32 else None
