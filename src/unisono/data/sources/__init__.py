"""Kinds of data sets that can be packed, one module each. `find` recognises the kind of a path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unisono.data.sources import arrow, cifar, folders, idx, shards, table
from unisono.data.sources.source import Source, same_classes
from unisono.errors import PackError

Splits = dict[str, Source]
"""Parts of a data set by name: train, test, ...; a data set without parts has one with an empty name."""

KINDS: tuple[Callable[[Path], Splits | None], ...] = (
    table.find,
    idx.find,
    cifar.find,
    arrow.find,
    shards.find,
    folders.find,
)


def find(path: Path) -> Splits:
    """Return the parts of the data set at `path`. Raises PackError if there is none of a known kind."""
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
