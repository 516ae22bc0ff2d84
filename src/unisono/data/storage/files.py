"""Samples in the files that a pack was made from, opened, read and decoded at each use (DIMD's figures 10 and 11).

    data.files           train/cat/1.jpg  train/cat/2.jpg  train/dog/1.jpg      as `unisono pack` took them
    pack, its index      sample 0         sample 1         sample 2             classes, labels, mean and std

    step ─▶ numbers ─▶ decoding threads: open, read, decode, crop          one file at a time in each thread

Nothing is read ahead but the batches that the threads prepare (`loading.py`), and nothing is in memory. The batches of
an epoch are those of a pack in memory: files that packing encodes again, whatever their size, are encoded as it does.
Where packing made images smaller, files are decoded in their own size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.data.kinds import Bytes, find_kind
from unisono.data.options import DataOptions
from unisono.data.order import Numbers
from unisono.data.pack.index import Index
from unisono.data.pack.packing import PackOptions, as_texts
from unisono.data.sources import find
from unisono.data.storage import Storage
from unisono.errors import DecodeError, PackError
from unisono.world import World


class FilesStorage(Storage):
    """Samples of a pack in the files that it was made from."""

    nbytes = 0

    def __init__(self, index: Index, world: World, options: DataOptions) -> None:
        """List the files, in `options.files`. Collective. Raises PackError on every rank if they are not the pack's."""
        super().__init__(len(index), world)
        self._read = world.call_on_all(lambda: find_files(index, options.files))

    def samples(self, numbers: Numbers) -> Sequence[NDArray[np.uint8]]:
        return ReadsOnUse(self._read, numbers.tolist())

    def close(self) -> None:
        """Free nothing: files are open only while they are read."""


class ReadsOnUse(Sequence[Bytes]):
    """Samples that are read when they are asked for, by the thread that decodes them."""

    def __init__(self, read: Callable[[int], Bytes], numbers: list[int]) -> None:
        self._read, self._numbers = read, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int) -> Bytes:  # type: ignore[override]  # no slices
        return self._read(self._numbers[row])


def find_files(index: Index, folder: str) -> Callable[[int], Bytes]:
    """Return the function that reads the file of a sample by its number, and raises DecodeError where it cannot.

    Raises PackError unless the files in `folder` are those that the pack was made from.
    """
    about = index.about
    if not folder:
        raise PackError('storage = "files", but files is empty: set data.files to the folder that was packed')
    if not find_kind(about.kind).endings:
        raise PackError(f'{index.folder} was not made from files of {about.kind}; take storage = "streamed"')
    splits = find(Path(folder))
    source = splits.get(index.folder.name) or splits.get("")
    if source is None:
        raise PackError(f"data.files = {folder} has no {index.folder.name}, but {', '.join(splits)}")
    left_out = {key for key, _ in about.skipped} - {key for key, _ in source.skipped}
    keys = as_texts(source.keys)
    rows = np.flatnonzero([key not in left_out for key in keys])
    if as_texts(source.classes) != about.classes or not np.array_equal(source.labels[rows], index.label):
        raise PackError(
            f"data.files = {folder} has {len(rows)} samples of {len(source.classes)} classes, and {index.folder} "
            f"{len(index)} of {len(about.classes)}, or others; name what it was packed from, or pack it again"
        )

    kind, packing = find_kind(about.kind), PackOptions(short_side=0, quality=about.quality)
    unchanged = np.zeros(len(rows), np.bool_)  # those that are known to be, so that their headers are read once

    def read(sample: int) -> Bytes:
        row = int(rows[sample])
        try:
            file = source.read(row)
            if not unchanged[sample]:
                # packs without `content`, of older releases, do not say their short side either
                kept = about.content and kind.is_packed_unchanged(file, about.short_side)
                if kept and len(file) != (size := int(index.length[sample])):
                    raise DecodeError(
                        f"{keys[row]} in {folder} has {len(file)} bytes, and had {size} when it was packed: put that "
                        "file back, or pack again"
                    )
                unchanged[sample] = kind.is_packed_unchanged(file)
            return np.frombuffer(bytearray(file if unchanged[sample] else kind.encode(file, packing)), np.uint8)
        except OSError as error:
            raise DecodeError(f"cannot read {keys[row]} in {folder}: {error.strerror or error}") from error

    return read
