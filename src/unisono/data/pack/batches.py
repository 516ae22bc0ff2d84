"""Conversion of a stretch of samples to an Arrow record batch with a checksum, and back.

    image (or audio)   label   key          beside the batch: crc32 of all of it
    binary             int64   string

The checksum covers the content of the columns, not Arrow's bytes: padding may differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.kinds import find_kind
from unisono.errors import PackError

try:  # the same number as zlib's, in a sixth of the time
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

CHECKSUM = b"crc32"
UNISONO = b"unisono"
"""Key in a schema's metadata for the description of the pack, in JSON."""

TYPES = (pa.binary(), pa.int64(), pa.string())

DAMAGE_ERRORS = (pa.ArrowException, ValueError, OSError)
"""Errors that Arrow raises for changed files; ValueError is raised for names that are no longer valid text."""


class EncodedSamples(NamedTuple):
    """Samples side by side in memory: sample i is data[offsets[i] : offsets[i + 1]]."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]


def schema(kind: str, about: dict[str, object]) -> pa.Schema:
    """Return the columns of a stripe; `about` describes the pack."""
    names = find_kind(kind).column, "label", "key"
    return pa.schema(list(zip(names, TYPES, strict=True)), {UNISONO: json.dumps(about).encode()})


def to_batch(
    columns: pa.Schema, samples: Sequence[bytes], labels: Sequence[int], keys: Sequence[str]
) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    """Return a record batch, and the metadata with its checksum that are written beside it."""
    arrays = [pa.array(values, kind) for values, kind in zip((samples, labels, keys), TYPES, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=columns)
    return batch, {CHECKSUM: f"{checksum(batch):08x}".encode()}


def checksum(batch: pa.RecordBatch) -> int:
    """Return the CRC-32 of a batch, with which a changed batch is recognised."""
    found = 0
    for column in (batch.column(0), batch.column(2)):
        data, offsets = _content(column)
        found = crc32(np.diff(offsets).data, crc32(data.data, found))
    return int(crc32(np.ascontiguousarray(np.from_dlpack(batch.column(1))).data, found))


def samples_of(path: Path, number: int, batch: pa.RecordBatch, metadata: dict[bytes, bytes]) -> EncodedSamples:
    """Return the samples of a batch that was read. Raises PackError, naming file and batch, if it was changed."""
    written = (metadata or {}).get(CHECKSUM, b"none").decode(errors="replace")
    found = f"{checksum(batch):08x}"
    if found != written:
        raise PackError(
            f"{path} is damaged: batch {number} has the checksum {found}, but {written} was written; copy the pack "
            "again"
        )
    return EncodedSamples(*_content(batch.column(0)))


def _content(column: pa.Array) -> EncodedSamples:
    """Return the bytes of a column of binary or text, as views of Arrow's memory."""
    _, offsets, data = column.buffers()
    begin, rows = column.offset, len(column)
    bounds = np.frombuffer(offsets, np.int32, rows + 1, 4 * begin).astype(np.int64) if rows else np.zeros(1, np.int64)
    whole = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return EncodedSamples(whole[bounds[0] : bounds[-1]], bounds - bounds[0])
