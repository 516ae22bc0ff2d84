"""Samples side by side in memory, with their numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from unisono.data.pack.batches import Samples


class Segment:
    """Samples by number: sample numbers[i] is data[offsets[i] : offsets[i + 1]]; there may be room after the last."""

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

    def take(self, rows: NDArray[np.int64], room: NDArray[np.uint8] | None = None) -> Segment:
        """These samples in this order, side by side in `room`, or in new memory."""
        lengths = np.diff(self.offsets)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths[rows], out=offsets[1:])
        data = np.empty(offsets[-1], np.uint8) if room is None else room[: offsets[-1]]
        if not len(data):
            return Segment(self.numbers[rows], data, offsets)
        if lengths.min() == lengths.max():
            shape = len(lengths), int(lengths[0])
            self.data[: self.nbytes].reshape(shape).take(rows, 0, data.reshape(len(rows), shape[1]), "clip")
        else:
            begins, ends = self.offsets[rows].tolist(), self.offsets[rows + 1].tolist()
            np.concatenate([self.data[begin:end] for begin, end in zip(begins, ends, strict=True)], out=data)
        return Segment(self.numbers[rows], data, offsets)
