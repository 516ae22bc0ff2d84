"""Stripes, written atomically, and read as stretches of samples.

While a data set is being packed, a note beside each finished stripe records its origin, so that packing can resume
where it stopped:

    stripe-00003.arrow.5f0c.partial ──(whole)──▶ stripe-00003.arrow + stripe-00003.json    all done: the index; notes go
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from unisono.data.pack.batches import EncodedSamples, schema, to_batch
from unisono.data.pack.index import Index
from unisono.data.pack.layout import BATCH_BYTES, stripe_name
from unisono.data.pack.stripe_file import OpenStripes, path_of
from unisono.data.sources.source import Source
from unisono.errors import DecodeError
from unisono.files import write_atomically

Encode = Callable[[bytes], bytes]


@dataclass(frozen=True)
class WrittenStripe:
    """Finished stripe: lengths and labels of its samples, the ends of its batches, and the samples skipped."""

    number: int
    nbytes: int
    lengths: list[int]
    labels: list[int]
    batches: list[int]
    skipped: list[tuple[str, str]]


def read_finished(folder: Path, number: int, fingerprint: str) -> WrittenStripe | None:
    """Return the stripe if an earlier run finished it from the same samples and options (`fingerprint`), else None."""
    content = _content(_note(folder, number))
    path = folder / stripe_name(number)
    if content.pop("fingerprint", None) != fingerprint or (content["nbytes"] and not path.is_file()):
        return None
    if content["nbytes"] and path.stat().st_size != content["nbytes"]:
        return None
    return WrittenStripe(**{**content, "skipped": [tuple(entry) for entry in content["skipped"]]})


def write_stripe(
    source: Source,
    first: int,
    last: int,
    encode: Encode,
    folder: Path,
    number: int,
    fingerprint: str,
    advance: Callable[[], None],
) -> WrittenStripe:
    """Write the samples `first` to `last` - 1 and return the stripe; `advance` is called after each. Raises OSError."""
    path = folder / stripe_name(number)
    columns = schema(source.kind, {"classes": source.classes, "kind": source.kind, "shape": source.shape})
    done = WrittenStripe(number, 0, [], [], [], [])
    with write_atomically(path) as partial:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, columns) as writer:
            for made, labels, keys in _batches(source, first, last, encode, done, advance):
                batch, metadata = to_batch(columns, made, labels, keys)
                writer.write_batch(batch, custom_metadata=metadata)
                done.lengths.extend(len(sample) for sample in made)
                done.labels.extend(labels)
                done.batches.append(len(done.lengths))
        nbytes = partial.stat().st_size if done.lengths else 0
    if not nbytes:
        path.unlink()
    done = WrittenStripe(number, nbytes, done.lengths, done.labels, done.batches, done.skipped)
    with write_atomically(_note(folder, number)) as partial:
        partial.write_text(json.dumps({"fingerprint": fingerprint, **vars(done)}))
    return done


def fingerprints(folder: Path) -> set[str]:
    """Return the fingerprints from which the finished stripes in a folder were made."""
    return {content["fingerprint"] for note in folder.glob("stripe-*.json") if (content := _content(note))}


def remove_notes(folder: Path) -> None:
    """Remove the notes, once the index has all that they record."""
    for note in folder.glob("stripe-*.json"):
        note.unlink()


def read_stretch(index: Index, first: int, last: int) -> Iterator[EncodedSamples]:
    """Yield the samples `first` to `last` - 1 in order, batch by batch, as `OpenStripes.read` does, and close them."""
    with closing(OpenStripes(index)) as stripes:
        yield from stripes.read(first, last)


def check_stripes(index: Index, first: int, last: int) -> None:
    """Raise PackError if a stripe of the samples `first` to `last` - 1 is missing or has another size than written."""
    for number in np.unique(index.stripe[first:last]).tolist():
        path_of(index, number)


def _batches(
    source: Source, first: int, last: int, encode: Encode, done: WrittenStripe, advance: Callable[[], None]
) -> Iterator[tuple[list[bytes], list[int], list[str]]]:
    """Yield converted samples, labels and keys in batches; samples that cannot be converted are added to `done`."""
    made, numbers, held = list[bytes](), list[int](), 0
    for number in range(first, last):
        try:
            sample = encode(source.read(number))
        except (DecodeError, OSError) as error:
            done.skipped.append((source.keys[number], getattr(error, "strerror", None) or str(error)))
            advance()
            continue
        if made and held + len(sample) > BATCH_BYTES:
            yield made, [int(source.labels[each]) for each in numbers], [source.keys[each] for each in numbers]
            made, numbers, held = [], [], 0
        made.append(sample)
        numbers.append(number)
        held += len(sample)
        advance()
    if made:
        yield made, [int(source.labels[each]) for each in numbers], [source.keys[each] for each in numbers]


def _note(folder: Path, number: int) -> Path:
    return folder / stripe_name(number).replace(".arrow", ".json")


def _content(note: Path) -> dict[str, Any]:
    """Return the content of a note, also of an older release; empty if it is missing or incomplete (a power cut)."""
    try:
        content: dict[str, Any] = json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if "mark" in content:  # older releases
        content["fingerprint"] = content.pop("mark")
    return content
