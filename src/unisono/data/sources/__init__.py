"""Formats of data sets that can be packed. Each has one file, and one row here; `find` recognises that of a path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unisono.data.kinds.text import TextOptions
from unisono.data.sources import arrow, cifar, folders, idx, shards, tabular, texts
from unisono.data.sources.source import Source, unify_classes
from unisono.errors import PackError

Splits = dict[str, Source]
"""Splits of a data set by name: train, test, ...; a data set without splits has one with an empty name."""

SOURCES: tuple[Callable[[Path], Splits | None], ...] = (
    tabular.find,
    idx.find,
    cifar.find,
    arrow.find,
    shards.find,
    folders.find,
)
"""Functions that return the splits of a data set, or None if it is of another format; the first to know it is taken."""


def find(path: Path, text: TextOptions | None = None) -> Splits:
    """Return the splits of the data set at `path`; `text` has the options for texts.

    Raises PackError if there is none of a known kind.
    """
    if not path.exists():
        raise PackError(f"{path}: no such file or folder")
    for source in SOURCES:
        found = source(path)
        if found:
            return unify_classes(found)
    if found := texts.find(path, text or TextOptions()):
        return unify_classes(found)
    raise PackError(
        f"{path} is no data set of a known kind: folders of classes with images or wav files, IDX files, CIFAR's files,"
        " tar shards, an Arrow data set on disk, a table (CSV, Parquet) of paths and labels, texts (files, JSON lines, "
        "Parquet with a column text, an npy file of tokens)"
    )
