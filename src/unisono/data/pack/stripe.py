"""Reading of stripes, Arrow files of record batches, which stay open: a batch is one read, into memory of our own.

    file      schema │ batch 0 │ batch 1 │ batch 2 │ footer         the footer is read once, when the stripe is opened
                                 └─ one read ─▶ memory ─▶ Arrow: columns, checksum     nothing is copied: samples are
                                                                                       views of the memory

Arrow's own memory is not writable, as PyTorch wants it, and its pages would be new for each batch. A map of the file
would end the process if the file were cut off meanwhile; a read of too few bytes is an error.

New memory costs as much as the read itself: the system clears its pages one by one when they are first touched. So it
is used again. Views of samples outlive the block: only the end of the last view, which a weak reference sees, says that
memory is spare:

    read block 0 ──▶ memory A ── views of its samples ── the last one is dropped ──▶ A is spare
    read block 1 ──▶ memory B                                                        read block 2 ──▶ memory A

Sizes are rounded up, so that blocks of a pack, of 4 MB each, fit the same memory. Memory that fits no block is dropped
for each that is allocated, so there is never more than was in use at once.
"""

from __future__ import annotations

import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.kinds import Bytes
from unisono.data.pack.index import CHECKSUM, DAMAGE_ERRORS, ORIGIN, TYPES, Index, checksum, content_of
from unisono.errors import PackError


class EncodedSamples(NamedTuple):
    """Samples side by side in memory: sample i is data[offsets[i] : offsets[i + 1]]."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    def each(self) -> list[NDArray[np.uint8]]:
        """Return a view of each sample."""
        return [self.data[begin:end] for begin, end in pairwise(self.offsets.tolist())]


def views(data: Any, begins: NDArray[np.int64], lengths: NDArray[np.integer]) -> list[Any]:
    """Return the parts of an array or a tensor that begin there and have these lengths."""
    return [data[begin:end] for begin, end in zip(begins.tolist(), (begins + lengths).tolist(), strict=True)]


def joined(samples: Sequence[NDArray[np.uint8]]) -> EncodedSamples:
    """Return samples side by side."""
    return EncodedSamples(np.concatenate(samples), np.array([0, *map(len, samples)], np.int64).cumsum())


def samples_of(path: Path, place: int, batch: pa.RecordBatch, metadata: dict[bytes, bytes]) -> EncodedSamples:
    """Return the samples of a batch that was read. Raises PackError, naming file and batch, if it was changed."""
    written = (metadata or {}).get(CHECKSUM, b"none").decode(errors="replace")
    computed = f"{checksum(batch):08x}"
    if computed != written:
        raise PackError(
            f"{path} is damaged: batch {place} has the checksum {computed}, but {written} was written; copy the pack "
            "again"
        )
    return EncodedSamples(*content_of(batch.column(0)))


KEPT_STRIPES = 64
"""Largest number of stripes that stay open between reads: a process may open 1,024 files by default."""


class OpenStripes:
    """Stripes of a pack, which any thread reads. Each is opened for the first read, and again if it was replaced."""

    def __init__(self, index: Index) -> None:
        self._index, self._memory, self._lock = index, BlockMemory(), threading.Lock()
        self._idle: list[StripeFile] = []
        self._kept = KEPT_STRIPES

    def read(self, first: int, last: int) -> Iterator[EncodedSamples]:
        """Yield the samples `first` to `last` - 1 in order, batch by batch, from as few stripes as have them.

        Raises PackError if a stripe is missing, has another size than was written, or a checksum is wrong.
        """
        stripes, begins = np.unique(self._index.stripe[first:last], return_index=True)
        for stripe, (begin, stop) in zip(stripes.tolist(), pairwise([*(first + begins).tolist(), last]), strict=True):
            yield from self._read(stripe, begin, stop)

    def close(self) -> None:
        """Close the stripes; one that is being read is closed after that."""
        with self._lock:
            self._kept, closed = 0, self._idle
            self._idle = []
        for file in closed:
            file.close()

    def _read(self, stripe: int, first: int, last: int) -> Iterator[EncodedSamples]:
        index, path = self._index, self._index.folder / self._index.about.stripes[stripe][0]
        try:
            with self._lent(stripe) as file:
                while first < last:
                    batch, row = int(index.batch[first]), int(index.row[first])
                    (data, offsets), labels = file.samples(batch)
                    inside = offsets[row : row + last - first + 1]
                    rows = len(inside) - 1
                    held, wanted = (np.diff(inside), labels[row:][:rows]), (index.length, index.label)
                    if rows <= 0 or not all(map(np.array_equal, held, (each[first : first + rows] for each in wanted))):
                        raise PackError(f"{path}: batch {batch} is not what the index says; pack the data again")
                    yield EncodedSamples(data[inside[0] : inside[-1]], inside - inside[0])
                    first += rows
        except DAMAGE_ERRORS as error:
            raise PackError(f"{path} is damaged: {str(error).splitlines()[0]}; copy the pack again") from error

    @contextmanager
    def _lent(self, stripe: int) -> Iterator[StripeFile]:
        """Lend a stripe to one thread, and keep it open for the next read unless that fails.

        It is opened anew if the file of its name is another by now.
        """
        path, status = path_of(self._index, stripe)
        identity = stripe, status.st_dev, status.st_ino
        with self._lock:
            file = next((idle for idle in self._idle if idle.identity[0] == stripe), None)
            if file is not None:
                self._idle.remove(file)
        if file is not None and file.identity != identity:
            file.close()
            file = None
        with ExitStack() as unless_whole:
            file = file or StripeFile(path, identity, self._memory, self._index.about.made_from)
            unless_whole.callback(file.close)
            yield file
            unless_whole.pop_all()
        with self._lock:
            self._idle.append(file)
            too_many = self._idle.pop(0) if len(self._idle) > self._kept else None
        if too_many is not None:
            too_many.close()


NOTHING = np.empty(0, np.uint8)


class StripeFile(io.FileIO):
    """Open stripe, for one thread. Arrow reads it by `seek` and `read`."""

    def __init__(
        self, path: Path, identity: tuple[int, int, int], memory: Callable[[int], Bytes], made_from: str
    ) -> None:
        """Open the file and read its footer. `identity` is its number, device and inode; `memory` allocates.

        Raises PackError if it is no stripe, or not the one of this name of the pack `made_from` this; DAMAGE_ERRORS.
        """
        super().__init__(path)
        self.identity, self._path, self._memory, self._found = identity, path, memory, NOTHING
        self._nbytes = os.fstat(self.fileno()).st_size
        with ExitStack() as unless_whole:
            unless_whole.callback(self.close)
            self._reader = pa.ipc.open_file(pa.PythonFile(self, "r"))
            if tuple(self._reader.schema.types) != TYPES:
                raise PackError(f"{path} is no stripe of a pack; copy the pack again")
            origin = f"{made_from} {path.name}".encode()
            if (self._reader.schema.metadata or {}).get(ORIGIN, origin) != origin:
                raise PackError(f"{path} is another stripe, or of another pack; copy the pack again")
            unless_whole.pop_all()

    def samples(self, batch: int) -> tuple[EncodedSamples, NDArray[np.int64]]:
        """Return the samples of a batch, writable, and their labels; none if there is no such batch.

        Raises PackError, DAMAGE_ERRORS.
        """
        if batch >= self._reader.num_record_batches:
            return EncodedSamples(NOTHING, np.zeros(1, np.int64)), np.empty(0, np.int64)
        try:
            rows, metadata = self._reader.get_batch_with_custom_metadata(batch)
            rows.validate()
            data, offsets = samples_of(self._path, batch, rows, metadata)
            return EncodedSamples(writable(data, self._found), offsets), np.array(np.from_dlpack(rows.column(1)))
        finally:
            self._found = NOTHING  # the memory belongs to the samples alone

    def read(self, nbytes: int | None = -1) -> memoryview:  # type: ignore[override]  # Arrow takes any buffer
        """Return the next bytes, fewer at the end of the file."""
        memory = self._memory(max(0, min(nbytes or 0, self._nbytes)))  # a damaged footer may ask for any number
        got = 0
        while got < len(memory) and (count := self.readinto(memory[got:].data)):
            got += count
        self._found = memory[:got]
        return self._found.data

    def close(self) -> None:
        """Close the file; samples that were read stay valid."""
        self._reader = None  # it refers to the file
        super().close()


def writable(data: Bytes, memory: Bytes) -> Bytes:
    """Return `data`, an array that may only be read, as a part of `memory`, in which it lies; a copy if it does not."""
    begin = data.ctypes.data - memory.ctypes.data
    if 0 <= begin <= len(memory) - len(data) and len(data):
        return memory[begin : begin + len(data)]
    return data.copy()


def path_of(index: Index, stripe: int) -> tuple[Path, os.stat_result]:
    """Return the path and status of a stripe. Raises PackError if it is missing or has another size than written."""
    name, nbytes = index.about.stripes[stripe]
    path = index.folder / name
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise PackError(f"{index.folder} is incomplete: {name} is missing; copy the pack again") from None
    if status.st_size != nbytes:
        raise PackError(f"{path} has {status.st_size} bytes, but {nbytes} were written; copy the pack again")
    return path, status


UNIT = 256 << 10
"""Bytes to whose multiple sizes are rounded up; smaller reads get memory that is not kept."""

MAX_EXCESS = 2
"""Largest size of spare memory that is used, as a multiple of the size that is needed."""


class BlockMemory:
    """Memory for blocks; any thread asks for it, and any thread drops the last view."""

    def __init__(self) -> None:
        self._spare: list[Bytes] = []
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> Bytes:
        """Return memory of `nbytes` bytes, writable, with any content."""
        if nbytes < UNIT:
            return np.empty(nbytes, np.uint8)
        size = -(-nbytes // UNIT) * UNIT
        with self._lock:
            rows = sorted(range(len(self._spare)), key=lambda row: (len(self._spare[row]), -row))
            fits = [row for row in rows if size <= len(self._spare[row]) <= MAX_EXCESS * size]
            # if none fits, the largest is dropped for the memory that is allocated
            spare = self._spare.pop((fits or rows[-1:])[0]) if rows else None
        memory = spare if spare is not None and fits else np.empty(size, np.uint8)
        # by way of a memoryview: NumPy would make views of views refer to `memory` itself, and not to `lease`
        lease = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(lease, self._spare.append, memory).atexit = False
        return lease


def read_stretch(index: Index, first: int, last: int) -> Iterator[EncodedSamples]:
    """Yield the samples `first` to `last` - 1 in order, batch by batch, as `OpenStripes.read` does, and close them."""
    with closing(OpenStripes(index)) as stripes:
        yield from stripes.read(first, last)


def read_samples(index: Index, numbers: NDArray[np.integer]) -> Iterator[EncodedSamples]:
    """Yield the samples with these numbers, which ascend, as `read_stretch` does; of each batch only those are kept."""
    cuts = np.flatnonzero(np.diff(index.stripe[numbers]) | np.diff(index.batch[numbers])) + 1
    with closing(OpenStripes(index)) as stripes:
        for wanted in np.split(numbers, cuts) if len(numbers) else ():
            for samples in stripes.read(int(wanted[0]), int(wanted[-1]) + 1):  # all of one batch
                complete = len(samples.offsets) - 1 == len(wanted)
                each = [] if complete else samples.each()
                yield samples if complete else joined([each[row] for row in (wanted - wanted[0]).tolist()])


def check_stripes(index: Index, first: int, last: int) -> None:
    """Raise PackError if a stripe of the samples `first` to `last` - 1 is missing or has another size than written."""
    for stripe in np.unique(index.stripe[first:last]).tolist():
        path_of(index, stripe)
