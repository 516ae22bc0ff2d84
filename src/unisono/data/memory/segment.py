"""Samples side by side in memory, with their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.pack.batches import Samples
from unisono.schedules.pieces import bounds

SLACK = 1.05
"""Room for samples, over what there is: in a shuffle as many come as go, but for chance."""

TURNS = 8
"""Parts in which samples of unlike lengths are taken: Arrow has memory of its own for each."""


class Segment:
    """Samples by number: sample i, of lengths[i] bytes, follows sample i - 1 in `data`, which may have room behind."""

    def __init__(self, numbers: NDArray[np.int32], data: NDArray[np.uint8], lengths: NDArray[np.int32]) -> None:
        self.numbers, self.data, self.lengths = numbers, data, lengths
        self.uniform = len(lengths) > 0 and int(lengths.min()) == int(lengths.max())
        """Whether all samples are as long, as raw ones are."""

    @classmethod
    def of(cls, first: int, stretches: Iterable[Samples]) -> Segment:
        """Consecutive samples from number `first` on."""
        parts = list(stretches)
        nbytes = sum(len(part.data) for part in parts)
        data = np.empty(int(SLACK * nbytes), np.uint8)
        np.concatenate([np.empty(0, np.uint8), *(part.data for part in parts)], out=data[:nbytes])
        lengths = np.concatenate([np.empty(0, np.int32), *(np.diff(part.offsets).astype(np.int32) for part in parts)])
        return cls(np.arange(first, first + len(lengths), dtype=np.int32), data, lengths)

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where each sample begins, and where the last one ends."""
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    @property
    def nbytes(self) -> int:
        """Bytes of the samples."""
        return len(self) * int(self.lengths[0]) if self.uniform else int(self.offsets[-1])

    def sample(self, row: int) -> NDArray[np.uint8]:
        """The bytes of a sample."""
        return self.data[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: NDArray[np.int64], room: NDArray[np.uint8] | None = None) -> Segment:
        """These samples in this order, side by side in `room`, or in new memory."""
        lengths = self.lengths[rows]
        nbytes = int(lengths.sum(dtype=np.int64))
        data = np.empty(nbytes, np.uint8) if room is None else room
        taken = Segment(self.numbers[rows], data, lengths)
        if self.uniform:
            shape = len(self), int(self.lengths[0])
            out = data[:nbytes].reshape(len(rows), shape[1])
            self.data[: self.nbytes].reshape(shape).take(rows, 0, out, "clip")
        elif nbytes:
            column = pa.LargeBinaryArray.from_buffers(
                pa.large_binary(), len(self), [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
            )
            for turn in range(TURNS):
                first, last = bounds(len(rows), TURNS, turn)
                begin, end = int(taken.offsets[first]), int(taken.offsets[last])
                if begin < end:
                    content = column.take(pa.array(rows[first:last])).buffers()[2]
                    data[begin:end] = np.frombuffer(content, np.uint8, end - begin)
        return taken
