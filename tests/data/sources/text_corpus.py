"""Tokens of a found text, as bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unisono.data.kinds.text import TextOptions
from unisono.data.sources import Source, find


def stream_of(source: Source) -> list[int]:
    """The tokens of all windows, joined again."""
    dtype = "<u2" if len(source.classes) <= 1 << 16 else "<u4"
    rows = [np.frombuffer(source.read(index), dtype).tolist() for index in range(len(source))]
    return rows[0] + [token for row in rows[1:] for token in row[1:]]


def texts_of(path: Path, window: int = 1) -> dict[str, bytes]:
    """The bytes of each split."""
    return {name: bytes(stream_of(source)) for name, source in find(path, TextOptions(window)).items()}
