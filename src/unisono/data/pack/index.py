"""Index of a pack: stripe, batch, row, length and label of every sample, and a description of the pack.

The index is an Arrow file like the stripes. Every rank keeps it in memory, 20 bytes a sample; the samples themselves
are read once, each by one rank of a group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.pack.batches import CHECKSUM, DAMAGES, UNISONO
from unisono.data.pack.layout import INDEX
from unisono.errors import PackError

VERSION = 1

COLUMNS = {"stripe": pa.int32(), "batch": pa.int32(), "row": pa.int32(), "length": pa.int32(), "label": pa.int32()}


@dataclass(frozen=True)
class About:
    """Description of a pack."""

    kind: str
    classes: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    """Shape of raw samples."""
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    """Mean and standard deviation of each channel, over about 1,000 images at most, for values from 0 to 1."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Samples that were skipped, as (key, reason)."""
    stripes: tuple[tuple[str, int], ...] = ()
    """Files of the stripes, as (name, bytes)."""
    made_from: str = ""
    """Fingerprint of the data set and of the settings with which it was packed."""
    version: int = VERSION


@dataclass(frozen=True)
class Index:
    """Places of all samples: arrays with one entry for each sample."""

    about: About
    stripe: NDArray[np.int32]
    batch: NDArray[np.int32]
    row: NDArray[np.int32]
    length: NDArray[np.int32]
    label: NDArray[np.int32]
    folder: Path = field(default_factory=Path)

    def __len__(self) -> int:
        return len(self.label)

    @property
    def mark(self) -> str:
        """Fingerprint of the samples, made from their number, lengths and labels."""
        return f"{len(self)} {_crc([self.length, self.label]):08x}"

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return int(self.length.sum(dtype=np.int64))


def write_index(index: Index, path: Path) -> None:
    """Write the index to a file. Raises OSError."""
    columns = {name: getattr(index, name) for name in COLUMNS}
    about = json.dumps(asdict(index.about)).encode()
    beside = {UNISONO: about, CHECKSUM: _checksum(columns, about)}
    batch = pa.record_batch(columns, schema=pa.schema(list(COLUMNS.items()), beside))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def read_index(folder: Path) -> Index:
    """Return the index of a pack. Raises PackError if it is missing, incomplete, damaged or of another version."""
    path = folder / INDEX
    if not path.is_file():
        there = "" if folder.is_dir() else ": there is no such folder"
        raise PackError(f"{folder} is no pack{there or f': it has no {INDEX}'}; unisono pack makes one")
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
            table.validate()
            columns = {name: column.to_numpy() for name, column in zip(table.column_names, table.columns, strict=True)}
    except DAMAGES as error:
        raise PackError(f"{path} is not whole ({str(error).splitlines()[0]}); pack the data again") from error
    beside = table.schema.metadata or {}
    if UNISONO not in beside or not table.schema.equals(pa.schema(list(COLUMNS.items()))):
        raise PackError(f"{path} is no index of a pack")
    if beside.get(CHECKSUM) != _checksum(columns, beside[UNISONO]):
        raise PackError(f"{path} is damaged: its checksum is not the one that was written; pack the data again")
    about = _about(json.loads(beside[UNISONO]), path)
    return Index(about, **columns, folder=folder)


def _about(content: dict[str, object], path: Path) -> About:
    if content.get("version") != VERSION:
        raise PackError(f"{path} is of version {content.get('version')}; this Unisono reads version {VERSION}")
    shape = content.get("shape")
    return About(
        kind=str(content["kind"]),
        classes=tuple(content["classes"]),  # type: ignore[arg-type]
        shape=tuple(shape) if shape else None,  # type: ignore[arg-type]
        mean=tuple(content["mean"]),  # type: ignore[arg-type]
        deviation=tuple(content["deviation"]),  # type: ignore[arg-type]
        skipped=tuple(tuple(entry) for entry in content["skipped"]),  # type: ignore[attr-defined]
        stripes=tuple(tuple(entry) for entry in content["stripes"]),  # type: ignore[attr-defined]
        made_from=str(content.get("made_from", "")),
    )


def _checksum(columns: dict[str, NDArray[np.int32]], about: bytes) -> bytes:
    return f"{_crc([columns[name] for name in COLUMNS], zlib.crc32(about)):08x}".encode()


def _crc(arrays: Iterable[NDArray[np.int32]], found: int = 0) -> int:
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found
