"""Index of a pack: stripe, batch, row, length and label of every sample, and a description; and batches of stripes.

The index is an Arrow file like the stripes. Every rank keeps it in memory, 20 bytes a sample; the samples themselves
are read once, each by one rank of a group.

    image (or audio)   label   key          a batch of a stripe, and beside it: crc32 of all of it
    binary             int64   string

The checksum covers the content of the columns, not Arrow's bytes: padding may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.kinds import find_kind
from unisono.data.pack import INDEX
from unisono.errors import PackError
from unisono.tables import parse

try:  # the same number as zlib's, in a sixth of the time
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

CHECKSUM = b"crc32"
UNISONO = b"unisono"
"""Key in a schema's metadata for the description of the pack, in JSON."""
ORIGIN = b"origin"
"""Key in a stripe's metadata for `made_from` of its pack, and its name; stripes of older releases have none."""

TYPES = (pa.binary(), pa.int64(), pa.string())

DAMAGE_ERRORS = (pa.ArrowException, ValueError, OSError)
"""Errors that Arrow raises for changed files; ValueError is raised for names that are no longer valid text."""

VERSION = 2
"""Version that is written and read."""

COLUMNS = {"stripe": pa.int32(), "batch": pa.int32(), "row": pa.int32(), "length": pa.int32(), "label": pa.int32()}


@dataclass(frozen=True)
class About:
    """Description of a pack."""

    kind: str
    classes: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    """Shape of raw samples."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Mean and standard deviation of each channel, over about 1,000 images at most, for values from 0 to 1."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Samples that were skipped, as (key, reason)."""
    stripes: tuple[tuple[str, int], ...] = ()
    """Files of the stripes, as (name, bytes)."""
    made_from: str = ""
    """Fingerprint of the data set and of the options with which it was packed."""
    mean_image: tuple[float, ...] = ()
    """Mean of the same images, each stretched to MEAN_SIDE x MEAN_SIDE: (rows, columns, channels), flat."""
    short_side: int = 256
    """Pixels to which longer short sides of images were reduced, 0: none; packs of older releases do not say."""
    quality: int = 90
    """Quality of JPEGs that were encoded again."""
    content: str = ""
    """CRC-32 of the samples' own, in order; packs of older releases have none."""
    version: int = VERSION


@dataclass(frozen=True)
class Index:
    """Positions of all samples: arrays with one entry for each sample."""

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
    def fingerprint(self) -> str:
        """Fingerprint of the samples: their number, lengths and labels; content, classes, kind and shape; classes."""
        about, samples = self.about, f"{len(self)} {_crc([self.length, self.label]):08x}"
        facts = [about.content, about.classes, about.kind, about.shape], about.classes
        return " ".join([samples, *(f"{crc32(json.dumps(each).encode()):08x}" for each in facts if about.content)])

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return int(self.length.sum(dtype=np.int64))


def write_index(index: Index, path: Path) -> None:
    """Write the index to a file. Raises OSError."""
    columns = {name: getattr(index, name) for name in COLUMNS}
    about = json.dumps(asdict(index.about)).encode()
    metadata = {UNISONO: about, CHECKSUM: _checksum(columns, about)}
    batch = pa.record_batch(columns, schema=pa.schema(list(COLUMNS.items()), metadata))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def read_index(folder: Path) -> Index:
    """Return the index of a pack. Raises PackError if it is missing, incomplete, damaged or of another version."""
    path = folder / INDEX
    if not path.is_file():
        reason = "" if folder.is_dir() else ": there is no such folder"
        raise PackError(f"{folder} is no pack{reason or f': it has no {INDEX}'}; create one with unisono pack")
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
            table.validate()
            # Not to_numpy(), which imports pandas: 0.14 s on every rank.
            joined = (column.combine_chunks() for column in table.columns)
            columns = dict(zip(table.column_names, map(np.from_dlpack, joined), strict=True))
    except DAMAGE_ERRORS as error:
        raise PackError(
            f"{path} is damaged or incomplete ({str(error).splitlines()[0]}); pack the data again"
        ) from error
    metadata = table.schema.metadata or {}
    if UNISONO not in metadata or not table.schema.equals(pa.schema(list(COLUMNS.items()))):
        raise PackError(f"{path} is no index of a pack")
    if metadata.get(CHECKSUM) != _checksum(columns, metadata[UNISONO]):
        raise PackError(f"{path} is damaged: its checksum is not the one that was written; pack the data again")
    content = {key: value for key, value in json.loads(metadata[UNISONO]).items() if value is not None}
    if content.get("version") != VERSION:
        raise PackError(f"{path} is of version {content.get('version')}; this release reads version {VERSION}")
    about = parse(About, content, str(path), PackError, strict=False)
    return Index(about, **columns, folder=folder)


def _checksum(columns: dict[str, NDArray[np.int32]], about: bytes) -> bytes:
    return f"{_crc([columns[name] for name in COLUMNS], crc32(about)):08x}".encode()


def _crc(arrays: Iterable[NDArray[np.int32]], crc: int = 0) -> int:
    for array in arrays:
        crc = crc32(np.ascontiguousarray(array).data, crc)
    return crc


def checksum_of(sample: bytes) -> int:
    """Return the CRC-32 of a sample."""
    return int(crc32(sample))


def schema(kind: str, about: Mapping[str, object], origin: str) -> pa.Schema:
    """Return the columns of a stripe; `about` describes the pack."""
    names, metadata = (find_kind(kind).column, "label", "key"), {UNISONO: json.dumps(about), ORIGIN: origin}
    return pa.schema(list(zip(names, TYPES, strict=True)), metadata)


def to_batch(
    columns: pa.Schema, samples: Sequence[bytes], labels: Sequence[int], keys: Sequence[str]
) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    """Return a record batch, and the metadata with its checksum that are written beside it."""
    arrays = [pa.array(values, kind) for values, kind in zip((samples, labels, keys), TYPES, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=columns)
    return batch, {CHECKSUM: f"{checksum(batch):08x}".encode()}


def checksum(batch: pa.RecordBatch) -> int:
    """Return the CRC-32 of a batch, with which a changed batch is recognised."""
    crc = 0
    for column in (batch.column(0), batch.column(2)):
        data, offsets = content_of(column)
        crc = crc32(np.diff(offsets).data, crc32(data.data, crc))
    return int(crc32(np.ascontiguousarray(np.from_dlpack(batch.column(1))).data, crc))


def content_of(column: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of a column of binary or text, as a view of Arrow's memory, and the bounds of its rows."""
    _, offsets, data = column.buffers()
    begin, rows = column.offset, len(column)
    bounds = np.frombuffer(offsets, np.int32, rows + 1, 4 * begin).astype(np.int64) if rows else np.zeros(1, np.int64)
    values = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return values[bounds[0] : bounds[-1]], bounds - bounds[0]


MAX_CLASSES_LISTED = 20


def describe(folder: Path) -> Iterator[str]:
    """Yield lines about a pack, or about all packs in the subfolders of `folder`. Raises PackError if there is none."""
    parts = [folder] if (folder / INDEX).exists() else sorted(path.parent for path in folder.glob(f"*/{INDEX}"))
    if not parts:
        raise PackError(f"{folder} is no pack, and has none in its subfolders; create one with unisono pack")
    for index in map(read_index, parts):
        about, lengths, kind = index.about, index.length, find_kind(index.about.kind)
        what = " ".join([about.kind, *([" x ".join(map(str, about.shape))] if about.shape is not None else [])])
        stripes = f"{index.nbytes / 1e6:,.1f} MB in {len(about.stripes)} stripes"
        yield f"{index.folder}: {len(index):,} samples ({what}), {stripes}"
        yield f"  bytes of a sample   {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.0f}"
        if about.mean:
            each = ", ".join(f"{mean:.3f} ± {off:.3f}" for mean, off in zip(about.mean, about.std, strict=True))
            yield f"  channels            {each}"
        labels = kind.labels_per_sample(about.shape)
        if labels > 1:
            yield f"  {kind.class_words:<20}{len(index) * labels:,} of a vocabulary of {len(about.classes):,}"
        else:
            yield from _classes(index)
        if about.skipped:
            yield f"  skipped             {len(about.skipped)}"
            yield from (f"    {key}: {why}" for key, why in about.skipped)


def _classes(index: Index) -> Iterator[str]:
    """Yield lines about the classes and their numbers of samples."""
    names = index.about.classes
    counts = np.bincount(index.label, minlength=len(names)).tolist()
    yield f"  classes             {len(names)}"
    listed, rest = names[:MAX_CLASSES_LISTED], counts[MAX_CLASSES_LISTED:]
    width = max(map(len, listed), default=0)
    for name, count in zip(listed, counts, strict=False):
        yield f"    {name:<{width}}  {count:>9,}"
    if rest:
        yield f"    and {len(rest)} more, with {min(rest):,} to {max(rest):,} samples"
