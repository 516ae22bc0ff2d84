"""Formats of data sets that can be packed. Each has one file, and one row here; `find` recognises that of a path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unisono.data.sources import (
    arrow,
    cifar,
    folders,
    idx,
    json_lines,
    shards,
    tabular,
    text_files,
    text_table,
    token_array,
)
from unisono.data.sources.source import Source, unify_classes
from unisono.data.sources.text_windows import windows_source
from unisono.data.text.options import TextOptions
from unisono.data.text.windows import TokenStream, with_test_split
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

TEXT_SOURCES: tuple[Callable[[Path, TextOptions], dict[str, TokenStream] | None], ...] = (
    token_array.find,
    json_lines.find,
    text_table.find,
    text_files.find,
)
"""Functions that return the tokens of each split of texts, or None if `path` is of another format."""


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
    for texts in TEXT_SOURCES:
        options = text or TextOptions()
        streams = texts(path, options)
        if streams:
            parts = with_test_split(streams)
            return unify_classes(
                {name: windows_source(each, options.window, path, name) for name, each in parts.items()}
            )
    raise PackError(
        f"{path} is no data set of a known kind: folders of classes with images or wav files, IDX files, CIFAR's files,"
        " tar shards, an Arrow data set on disk, a table (CSV, Parquet) of paths and labels, texts (files, JSON lines, "
        "Parquet with a column text, an npy file of tokens)"
    )
