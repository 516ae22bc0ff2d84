"""What can be packed: one kind of data set a file. `find` tells which kind a path is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unisono.data.sources import arrow, cifar, folders, idx, shards, table
from unisono.data.sources.source import Source, same_classes
from unisono.errors import PackError

Splits = dict[str, Source]
"""The parts of a data set by name: train, test, ...; one without a name where it has no parts."""

KINDS: tuple[Callable[[Path], Splits | None], ...] = (
    table.find,
    idx.find,
    cifar.find,
    arrow.find,
    shards.find,
    folders.find,
)


def find(path: Path) -> Splits:
    """The parts of the data set at `path`. Raises PackError where there is none that is known here."""
    if not path.exists():
        raise PackError(f"{path}: there is no such file or folder")
    for kind in KINDS:
        found = kind(path)
        if found:
            return same_classes(found)
    raise PackError(
        f"{path} is none of: folders of classes with pictures or wav files, IDX files, CIFAR's files, tar shards, an "
        "Arrow data set on disk, a table (CSV, Parquet) of paths and labels"
    )
