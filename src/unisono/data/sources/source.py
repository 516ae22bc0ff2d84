"""Data set as it is found: properties known without reading its samples, and a function that reads each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np
from numpy.typing import NDArray

from unisono.data.kinds import KINDS, RAW, find_kind
from unisono.data.pack.layout import TEST_SPLITS, TRAIN_SPLITS
from unisono.errors import PackError

ENDINGS = {ending: name for name in KINDS for ending in find_kind(name).endings}
"""Kind of a file, by the ending of its name."""

FILE_KINDS = " or ".join(dict.fromkeys(ENDINGS.values()))
"""Kinds of files, for messages."""

SPLITS = (*TRAIN_SPLITS, *TEST_SPLITS)
"""Folder names that mean splits of a data set, not classes."""


@dataclass(frozen=True)
class Source:
    """Samples that can be read one by one, in any thread."""

    kind: str
    """Name of the kind of its samples."""
    classes: tuple[str, ...]
    keys: Sequence[str]
    """Origin of each sample, such as its path."""
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64]
    """Bytes of each sample as it is found."""
    read: Callable[[int], bytes]
    """Function that returns the bytes of a sample by number. Raises OSError."""
    shape: tuple[int, ...] | None = None
    """Shape of raw samples: (height, width) or (height, width, channels)."""
    files: Sequence[Path] = ()
    """Files that the samples are read from."""
    skipped: Sequence[tuple[str, str]] = ()
    """Samples that are there and cannot be packed, as (key, reason)."""
    empty: Sequence[str] = ()
    """Names of folders that would be classes if they had samples."""

    def __len__(self) -> int:
        return len(self.labels)


def raw_source(
    images: NDArray[np.uint8], labels: NDArray[np.int64], classes: tuple[str, ...], name: str, files: Sequence[Path]
) -> Source:
    """Return the source of images in memory, (samples, height, width) or (samples, height, width, channels)."""
    keys = [f"{name}/{number}" for number in range(len(images))]
    sizes = np.full(len(images), images[:1].nbytes, np.int64)
    return Source(RAW, classes, keys, labels, sizes, lambda number: images[number].tobytes(), images.shape[1:], files)


def kind_of(name: str) -> str | None:
    """Return the kind of a file with this name; None if it is not known, or the file is hidden."""
    path = PurePath(name)
    return None if path.name.startswith(".") else ENDINGS.get(path.suffix.lower())


def common_kind(names: Sequence[str], where: Path) -> str:
    """Return the kind of all these files. Raises PackError if they differ."""
    kinds = {kind_of(name) for name in names}
    found = [kind for kind in KINDS if kind in kinds]
    if len(found) > 1:
        several = " and ".join(find_kind(kind).plural for kind in found)
        raise PackError(f"{where} has {several} files; pack them one by one")
    return found[0]


def number_classes(names: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the sorted classes (by number if all are numbers), and the class number of each name, int64."""
    unique = set(names)
    numbers = all(name.isdecimal() for name in unique)
    classes = tuple(sorted(unique, key=lambda name: (int(name), name)) if numbers else sorted(unique))
    number_of = {name: number for number, name in enumerate(classes)}
    return classes, np.array([number_of[name] for name in names], np.int64)


def unify_classes(splits: dict[str, Source]) -> dict[str, Source]:
    """Return the splits renumbered, so that a class has one number in all of them, even where it has no sample."""
    if len({split.classes for split in splits.values()}) == 1:
        return splits
    classes, _ = number_classes([name for split in splits.values() for name in split.classes])
    number_of = {name: number for number, name in enumerate(classes)}
    made = {}
    for name, split in splits.items():
        numbers = np.array([number_of[each] for each in split.classes], np.int64)
        made[name] = replace(split, classes=classes, labels=numbers[split.labels])
    return made
