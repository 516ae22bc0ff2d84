"""Parallel loading: the next batches are made while the network trains (Theano-MPI 3.3, Algorithm 1).

    training   step 0 ───── step 1 ───── step 2 ───── ...        a step finds its batch there, unless loading is
    loading    batch 0, 1, 2 │ batch 3 ── │ batch 4 ── │          slower; the time it waits is told

There are AHEAD batches made in advance, each by all threads together. Threads, not processes: a fork after MPI has
started is never made, and decoding lets other threads run. Modes: train (with changes at random), validate (without),
stop.

The random numbers of a sample follow from seed, epoch and its number alone, so that they are the same on any number of
ranks and after any resume.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from unisono.data.dice import DRAWS, Throws, dice
from unisono.data.pack.index import Index
from unisono.errors import PictureError
from unisono.schedules.pieces import bounds

AHEAD = 2
"""Batches that are made in advance."""

Numbers = NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs, as what shows them lays them out, and labels, int64.

Pictures are (samples, colors, size, size) in channels-last memory, recordings (samples, windows, numbers).
"""


class Mode(Enum):
    """What batches are made for."""

    TRAIN = "train"
    VALIDATE = "validate"


class Memory(Protocol):
    """Where samples lie."""

    def samples(self, numbers: Numbers) -> Sequence[NDArray[np.uint8]]:
        """The bytes of samples by number."""
        ...


class Showing(Protocol):
    """Makes numbers for a network of the bytes of samples, in one thread."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample's numbers as they lie in memory; the last is how many channels a network sees."""
        ...

    def into(self, out: torch.Tensor, file: memoryview, random: Throws | None) -> None:
        """Show one sample in `out`, of that shape; without `random`, as in validation. Raises PictureError."""
        ...

    def batch(self, memory: torch.Tensor) -> torch.Tensor:
        """Samples side by side, (samples, *shape), as a network takes them."""
        ...


class Loader:
    """Makes batches of a pack's samples in threads of its own."""

    def __init__(
        self,
        index: Index,
        memory: Memory,
        showing: Callable[[], Showing],
        threads: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`showing` makes what shows samples, one for each thread; `dtype` is float32 or bfloat16."""
        self._labels = torch.from_numpy(index.label.astype(np.int64))
        self._index, self._memory, self._showing, self._dtype = index, memory, showing, dtype
        first = showing()  # which finds libraries here, once, not in all threads at once
        self.shape, self._batch = first.shape, first.batch
        self._threads, self._own = threads, threading.local()
        self._pool = ThreadPoolExecutor(threads, "loading", self._begin)
        self._spare: list[torch.Tensor] = []

    def batches(self, wanted: Iterable[Numbers], mode: Mode, seed: int = 0, epoch: int = 0) -> Iterator[Batch]:
        """The batches of these samples, one after the other. A batch's memory is used again after the next one.

        Raises PictureError, naming the sample, where one cannot be decoded. Closing the iterator stops the loading.
        """
        coming: deque[tuple[torch.Tensor, Numbers, list[Future[None]]]] = deque()
        source = iter(wanted)
        shown: torch.Tensor | None = None
        try:
            while True:
                while len(coming) <= AHEAD and (numbers := next(source, None)) is not None:
                    coming.append(self._start(numbers, mode, seed, epoch))
                if not coming:
                    return
                memory, numbers, works = coming[0]
                for work in works:
                    work.result()
                coming.popleft()
                if shown is not None:
                    self._spare.append(shown)
                shown = memory
                yield self._batch(memory[: len(numbers)]), self._labels[numbers]
        finally:
            for memory, _, works in coming:
                for work in works:
                    work.cancel()
                for work in works:
                    if not work.cancelled():
                        work.exception()
                self._spare.append(memory)
            if shown is not None:
                self._spare.append(shown)

    def blank(self, samples: int) -> torch.Tensor:
        """Zeros, as the inputs of a batch are laid out."""
        return self._batch(torch.zeros((samples, *self.shape), dtype=self._dtype))

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _start(
        self, numbers: Numbers, mode: Mode, seed: int, epoch: int
    ) -> tuple[torch.Tensor, Numbers, list[Future[None]]]:
        """Have the threads make a batch, a stretch each."""
        memory = self._room(len(numbers))
        samples = self._memory.samples(numbers)

        def make(first: int, last: int) -> None:
            own = numbers[first:last]
            draws = dice(seed, epoch, own, DRAWS).tolist() if mode is Mode.TRAIN else [None] * len(own)
            for place, number, drawn in zip(range(first, last), own.tolist(), draws, strict=True):
                self._show(memory[place], samples[place], None if drawn is None else Throws(drawn), number)

        cuts = [bounds(len(numbers), self._threads, thread) for thread in range(self._threads)]
        return memory, numbers, [self._pool.submit(make, first, last) for first, last in cuts if first < last]

    def _show(self, out: torch.Tensor, sample: NDArray[np.uint8], throws: Throws | None, number: int) -> None:
        try:
            self._own.show.into(out, sample.data, throws)
        except PictureError as error:
            raise PictureError(f"sample {number} of {self._index.folder}: {error}") from error

    def _room(self, samples: int) -> torch.Tensor:
        """Memory for a batch: what another has left, where it is large enough."""
        for place, spare in enumerate(self._spare):
            if len(spare) >= samples:
                return self._spare.pop(place)
        self._spare.clear()
        return torch.empty((samples, *self.shape), dtype=self._dtype)

    def _begin(self) -> None:
        """A thread starts: it works alone, beside the others."""
        torch.get_num_threads()  # PyTorch sets a new thread's number when it is first asked
        threadpool_limits(1, user_api="openmp")
        self._own.show = self._showing()
