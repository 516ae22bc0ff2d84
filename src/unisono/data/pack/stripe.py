"""Stripes: Arrow files of record batches with a checksum each, written atomically.

    image (or audio)   label   key          beside the batch: crc32 of all of it
    binary             int64   string

The checksum covers the content of the columns, not Arrow's bytes: padding may differ. While a data set is being packed,
a note beside each finished stripe records its origin, so that packing can resume where it stopped:

    stripe-00003.arrow.5f0c.partial ──(whole)──▶ stripe-00003.arrow + stripe-00003.json    all done: the index; notes go
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.kinds import find_kind
from unisono.data.pack.layout import BATCH_BYTES, stripe_name
from unisono.data.sources import Source
from unisono.errors import DecodeError, PackError
from unisono.files import write_atomically
from unisono.tables import parse

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

    def each(self) -> list[NDArray[np.uint8]]:
        """Return a view of each sample."""
        return [self.data[begin:end] for begin, end in pairwise(self.offsets.tolist())]


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


@dataclass(frozen=True)
class WrittenStripe:
    """Finished stripe: lengths and labels of its samples, the ends of its batches, and the samples skipped."""

    number: int
    nbytes: int
    lengths: tuple[int, ...]
    labels: tuple[int, ...]
    batches: tuple[int, ...]
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class StripeWriter:
    """Writer of the stripes of a pack, in any threads."""

    source: Source
    folder: Path
    fingerprint: str
    """Fingerprint of the samples and options, by which a later run knows stripes that are finished."""
    encode: Callable[[bytes], bytes]
    """Function that returns the bytes to pack of a sample that is not empty. Raises DecodeError."""
    advance: Callable[[], None]
    """Function that is called after each sample."""
    stop: Event = field(default_factory=Event)
    """Event that ends the work of all threads, by CancelledError."""

    def finished(self, number: int) -> WrittenStripe | None:
        """Return the stripe if an earlier run finished it from the same samples and options, else None."""
        content, path = _read_note(_note(self.folder, number)), self.folder / stripe_name(number)
        if content.get("fingerprint") != self.fingerprint:
            return None
        found = parse(WrittenStripe, content, f"the note of {path}", PackError, strict=False)
        return found if not found.nbytes or (path.is_file() and path.stat().st_size == found.nbytes) else None

    def write(self, number: int, first: int, last: int) -> WrittenStripe:
        """Write the samples `first` to `last` - 1 and return the stripe. Raises OSError."""
        source, path = self.source, self.folder / stripe_name(number)
        columns = schema(source.kind, {"classes": source.classes, "kind": source.kind, "shape": source.shape})
        lengths, labels, batches, skipped = list[int](), list[int](), list[int](), list[tuple[str, str]]()
        with write_atomically(path) as partial:
            with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, columns) as writer:
                for made, numbers in self._batches(first, last, skipped):
                    own = [int(source.labels[each]) for each in numbers]
                    batch, metadata = to_batch(columns, made, own, [source.keys[each] for each in numbers])
                    writer.write_batch(batch, custom_metadata=metadata)
                    lengths += map(len, made)
                    labels += own
                    batches.append(len(lengths))
            nbytes = partial.stat().st_size if lengths else 0
        if not nbytes:
            path.unlink()
        done = WrittenStripe(number, nbytes, tuple(lengths), tuple(labels), tuple(batches), tuple(skipped))
        with write_atomically(_note(self.folder, number)) as partial:
            partial.write_text(json.dumps({"fingerprint": self.fingerprint, **vars(done)}))
        return done

    def _batches(
        self, first: int, last: int, skipped: list[tuple[str, str]]
    ) -> Iterator[tuple[list[bytes], list[int]]]:
        """Yield converted samples and their numbers in batches; `skipped` gets those that cannot be converted."""
        made, numbers, held = list[bytes](), list[int](), 0
        for number in range(first, last):
            if self.stop.is_set():
                raise CancelledError
            try:
                if not (sample := self.source.read(number)):
                    raise DecodeError("it is empty")  # noqa: TRY301
                sample = self.encode(sample)
            except (DecodeError, OSError) as error:
                skipped.append((self.source.keys[number], getattr(error, "strerror", None) or str(error)))
            else:
                if made and held + len(sample) > BATCH_BYTES:
                    yield made, numbers
                    made, numbers, held = [], [], 0
                made.append(sample)
                numbers.append(number)
                held += len(sample)
            self.advance()
        if made:
            yield made, numbers


def fingerprints(folder: Path) -> set[str]:
    """Return the fingerprints from which the finished stripes in a folder were made."""
    return {content["fingerprint"] for note in folder.glob("stripe-*.json") if (content := _read_note(note))}


def remove_notes(folder: Path) -> None:
    """Remove the notes, once the index has all that they record."""
    for note in folder.glob("stripe-*.json"):
        note.unlink()


def _note(folder: Path, number: int) -> Path:
    return folder / stripe_name(number).replace(".arrow", ".json")


def _read_note(note: Path) -> dict[str, Any]:
    """Return the content of a note, also of an older release; empty if it is missing or incomplete (a power cut)."""
    try:
        content: dict[str, Any] = json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if "mark" in content:  # older releases
        content["fingerprint"] = content.pop("mark")
    return content
