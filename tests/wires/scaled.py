"""A wire of one's own: 8-bit integers, with a scale for each block of numbers."""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 64


class Scaled:
    """float32 as 8-bit integers times a power of two, which is the block's: one byte a number, four a block."""

    elementwise = False

    def nbytes(self, length: int) -> int:
        return length + 4 * -(-length // BLOCK)

    def encode(self, values: np.ndarray, encoded: np.ndarray) -> None:
        scales, numbers = self._parts(encoded, len(values))
        for place, block in enumerate(self._blocks(values)):
            largest = float(np.abs(block).max(initial=0))
            scales[place] = 2.0 ** np.ceil(np.log2(largest / 127)) if largest else 0.0
        self._blocks(numbers, np.round(self._over(values, scales)))
        self.decode(encoded, values)

    def decode(self, encoded: np.ndarray, values: np.ndarray) -> None:
        scales, numbers = self._parts(encoded, len(values))
        values[:] = numbers * np.repeat(scales, BLOCK)[: len(values)]

    def _over(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        each = np.repeat(scales, BLOCK)[: len(values)]
        return np.divide(values, each, out=np.zeros_like(values), where=each > 0)

    def _parts(self, encoded: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        count = 4 * -(-length // BLOCK)
        return encoded[:count].view(np.float32), encoded[count:].view(np.int8)

    def _blocks(self, values: np.ndarray, new_values: np.ndarray | None = None) -> list[np.ndarray]:
        if new_values is not None:
            values[:] = new_values
        return [values[start : start + BLOCK] for start in range(0, len(values), BLOCK)]


def scaled(dtype: torch.dtype) -> Scaled | None:
    return Scaled() if dtype is torch.float32 else None
