"""Data sets that can be packed: a format has one file, and one row here; `find` recognises that of a path.

A source has the properties that are known without reading its samples, and a function that reads each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np
from numpy.typing import NDArray

from unisono.data.kinds import KINDS, RAW, find_kind
from unisono.data.kinds.text import TextOptions
from unisono.data.pack import TEST_SPLITS, TRAIN_SPLITS
from unisono.errors import PackError
from unisono.registry import Registry

FORMATS = Registry(
    "format",
    {
        "table": "unisono.data.sources.tabular:find",
        "idx": "unisono.data.sources.idx:find",
        "cifar": "unisono.data.sources.cifar:find",
        "arrow": "unisono.data.sources.arrow:find",
        "tar": "unisono.data.sources.shards:find",
        "folders": "unisono.data.sources.folders:find",
    },
)
"""Functions that return the splits of the data set at a path, None if it is of another format; the first to know it is
taken. What none of them knows may be texts (`texts.py`)."""

ENDINGS = {ending: name for name in KINDS for ending in find_kind(name).endings}
"""Kind of a file, by the ending of its name."""

FILE_KINDS = " or ".join(dict.fromkeys(ENDINGS.values()))
"""Kinds of files, for messages."""

SPLITS = (*TRAIN_SPLITS, *TEST_SPLITS)
"""Folder names that mean splits of a data set, not classes; in small letters or capitals."""


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
    others: Sequence[str] = ()
    """Files of unknown kinds among those of the samples, which are left out."""

    def __len__(self) -> int:
        return len(self.labels)


Splits = dict[str, Source]
"""Splits of a data set by name: train, test, ...; a data set without splits has one with an empty name."""


@contextmanager
def reading(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turn OSError and these errors, of a file that cannot be read, into a PackError of one line."""
    failures: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except failures as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise PackError(f"cannot read {path}: {reason}") from error


def walk(path: Path) -> Iterator[Path]:
    """Yield the files in a folder and all below it; links are followed, but not into a folder that leads to them.

    Hidden files and folders are left out. Raises PackError for a folder that cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise PackError(f"cannot list {error.filename}: {error.strerror}; allow it, or move it elsewhere") from error

    above = {path: frozenset(map(_identity, path.resolve().parents))}
    for name, folders, names in os.walk(path, followlinks=True, onerror=fail):
        folder = Path(name)
        leading = above.pop(folder) | {_identity(folder)}
        folders[:] = [each for each in folders if each[0] != "." and _identity(folder / each) not in leading]
        above |= {folder / each: leading for each in folders}
        yield from (folder / each for each in names if each[0] != ".")


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def raw_source(
    images: NDArray[np.uint8], labels: NDArray[np.int64], classes: tuple[str, ...], name: str, files: Sequence[Path]
) -> Source:
    """Return the source of images in memory, (samples, height, width) or (samples, height, width, channels)."""
    keys = [f"{name}/{number}" for number in range(len(images))]
    sizes = np.full(len(images), images[:1].nbytes, np.int64)
    return Source(RAW, classes, keys, labels, sizes, lambda number: images[number].tobytes(), images.shape[1:], files)


def labelled_source(
    keys: Sequence[str],
    labels: Sequence[str],
    sizes: Sequence[int],
    read: Callable[[int], bytes],
    where: Path,
    files: Sequence[Path],
) -> Source:
    """Return the source of files with these names and the names of their classes.

    Raises PackError, naming `where`, if they are of different kinds.
    """
    kinds = {kind_of(key) for key in keys}
    kind, *others = [kind for kind in KINDS if kind in kinds]
    if others:
        several = " and ".join(find_kind(each).plural for each in (kind, *others))
        raise PackError(f"{where} has {several} files; pack them one by one")
    classes, numbers = number_classes(labels)
    return Source(kind, classes, keys, numbers, np.array(sizes, np.int64), read, None, files)


def split_of(names: Iterable[str]) -> str:
    """Return the first name of a split, in small letters; empty if there is none."""
    return next((name.lower() for name in names if name.lower() in SPLITS), "")


def kind_of(name: str) -> str | None:
    """Return the kind of a file with this name; None if it is not known, or the file is hidden."""
    path = PurePath(name)
    return None if path.name.startswith(".") else ENDINGS.get(path.suffix.lower())


def number_classes(names: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the sorted classes (by number if all are numbers), and the class number of each name, int64."""
    unique = set(names)
    numbers = all(name.isdecimal() for name in unique)
    classes = tuple(sorted(unique, key=lambda name: (int(name), name)) if numbers else sorted(unique))
    number_of = {name: number for number, name in enumerate(classes)}
    return classes, np.array([number_of[name] for name in names], np.int64)


def find(path: Path, text: TextOptions = TextOptions()) -> Splits:  # noqa: B008  frozen
    """Return the splits of the data set at `path`; `text` has the options for texts.

    Raises PackError if there is none of a known kind.
    """
    if not path.exists():
        raise PackError(f"{path}: no such file or folder")
    from unisono.data.sources import texts  # noqa: PLC0415  a source itself, as those of FORMATS

    found: Splits
    try:
        for name in FORMATS:
            if found := FORMATS.load(name)(path):
                return unify_classes(found)
        if found := texts.find(path, text):
            return unify_classes(found)
    except UnicodeDecodeError as error:  # Arrow decodes the names of columns where they are used
        raise PackError(f"{path} has a name or a text that is no UTF-8: {error}; convert it to UTF-8") from error
    raise PackError(
        f"{path} is no data set of a known kind: folders of classes with images or wav files, IDX files, CIFAR's files,"
        " tar shards, an Arrow data set on disk, a table (CSV, Parquet) of paths and labels, texts (files, JSON lines, "
        "Parquet with a column text, an npy file of tokens)"
    )


def unify_classes(splits: Splits) -> Splits:
    """Return the splits renumbered, so that a class has one number in all of them, even where it has no sample.

    Raises PackError as `common_classes`.
    """
    each = [split.classes for split in splits.values()]
    if len(set(each)) == 1:
        return splits
    classes, numbers = common_classes(each, {split.kind for split in splits.values()})
    return {
        name: replace(split, classes=classes, labels=new[split.labels])
        for (name, split), new in zip(splits.items(), numbers, strict=True)
    }


def common_classes(
    each: Sequence[tuple[str, ...]], kinds: Iterable[str]
) -> tuple[tuple[str, ...], list[NDArray[np.int64]]]:
    """Return the classes of all parts of a data set in one numbering, and the new number of each class of each part.

    Raises PackError for texts of several vocabularies: the samples themselves are numbers of tokens.
    """
    if len(set(each)) == 1:
        return each[0], [np.arange(len(names)) for names in each]
    for kind in map(find_kind, kinds):
        if kind.labels_are_tokens:
            raise PackError(
                f"the {kind.plural} have several vocabularies; {kind.class_remedy}, or pack them one by one"
            )
    classes, numbers = number_classes([name for names in each for name in names])
    return classes, np.split(numbers, np.cumsum([len(names) for names in each])[:-1])
