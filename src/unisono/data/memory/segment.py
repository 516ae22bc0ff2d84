"""Samples side by side in memory, with their numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.pack.batches import Samples


class Segment:
    """Samples by number: sample numbers[i] is data[offsets[i] : offsets[i + 1]]."""

    def __init__(self, numbers: NDArray[np.int32], data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        self.numbers, self.data, self.offsets = numbers, data, offsets

    @classmethod
    def of(cls, first: int, stretches: Iterable[Samples]) -> Segment:
        """Consecutive samples from number `first` on."""
        parts = list(stretches)
        data = np.concatenate([part.data for part in parts]) if parts else np.empty(0, np.uint8)
        lengths = [np.diff(part.offsets) for part in parts]
        offsets = np.concatenate([[0], *lengths]).cumsum()
        return cls(np.arange(first, first + len(offsets) - 1, dtype=np.int32), data, offsets)

    @classmethod
    def empty(cls) -> Segment:
        """No samples."""
        return cls(np.empty(0, np.int32), np.empty(0, np.uint8), np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples."""
        return int(self.offsets[-1])

    def sample(self, row: int) -> NDArray[np.uint8]:
        """The bytes of a sample."""
        return self.data[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: NDArray[np.int64]) -> Segment:
        """These samples in this order, side by side in new memory."""
        lengths = np.diff(self.offsets)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths[rows], out=offsets[1:])
        if len(lengths) and lengths.min() == lengths.max():
            data = self.data[: self.nbytes].reshape(len(lengths), -1).take(rows, axis=0).reshape(-1)
        else:
            column = pa.LargeBinaryArray.from_buffers(
                pa.large_binary(), len(lengths), [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
            )
            taken = column.take(pa.array(rows)).buffers()[2]
            data = _writable(taken, int(offsets[-1]))
        return Segment(self.numbers[rows], data, offsets)


def _writable(buffer: pa.Buffer, nbytes: int) -> NDArray[np.uint8]:
    """Memory that Arrow has just made for us alone; it calls it constant, and PyTorch would warn of that."""
    if not nbytes:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * nbytes).from_address(buffer.address)
    memory.owner = buffer  # type: ignore[attr-defined]  # it lives as long as the view of it
    return np.frombuffer(memory, np.uint8)
