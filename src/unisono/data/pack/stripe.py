"""Stripes, written atomically.

While a data set is being packed, a note beside each finished stripe records its origin, so that packing can resume
where it stopped:

    stripe-00003.arrow.5f0c.partial ──(whole)──▶ stripe-00003.arrow + stripe-00003.json    all done: the index; notes go
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from unisono.data.pack.batches import schema, to_batch
from unisono.data.pack.layout import BATCH_BYTES, stripe_name
from unisono.data.sources.source import Source
from unisono.errors import DecodeError
from unisono.files import write_atomically


@dataclass(frozen=True)
class WrittenStripe:
    """Finished stripe: lengths and labels of its samples, the ends of its batches, and the samples skipped."""

    number: int
    nbytes: int
    lengths: list[int]
    labels: list[int]
    batches: list[int]
    skipped: list[tuple[str, str]]


@dataclass(frozen=True)
class StripeWriter:
    """Writer of the stripes of a pack, in any threads."""

    source: Source
    folder: Path
    fingerprint: str
    """Fingerprint of the samples and options, by which a later run knows stripes that are finished."""
    encode: Callable[[bytes], bytes]
    """Function that returns the bytes to pack of a sample. Raises DecodeError."""
    advance: Callable[[], None]
    """Function that is called after each sample."""

    def finished(self, number: int) -> WrittenStripe | None:
        """Return the stripe if an earlier run finished it from the same samples and options, else None."""
        content = _content(_note(self.folder, number))
        path = self.folder / stripe_name(number)
        if content.pop("fingerprint", None) != self.fingerprint or (content["nbytes"] and not path.is_file()):
            return None
        if content["nbytes"] and path.stat().st_size != content["nbytes"]:
            return None
        return WrittenStripe(**{**content, "skipped": [tuple(entry) for entry in content["skipped"]]})

    def write(self, number: int, first: int, last: int) -> WrittenStripe:
        """Write the samples `first` to `last` - 1 and return the stripe. Raises OSError."""
        source, path = self.source, self.folder / stripe_name(number)
        columns = schema(source.kind, {"classes": source.classes, "kind": source.kind, "shape": source.shape})
        done = WrittenStripe(number, 0, [], [], [], [])
        with write_atomically(path) as partial:
            with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, columns) as writer:
                for made, numbers in self._batches(first, last, done.skipped):
                    labels = [int(source.labels[each]) for each in numbers]
                    batch, metadata = to_batch(columns, made, labels, [source.keys[each] for each in numbers])
                    writer.write_batch(batch, custom_metadata=metadata)
                    done.lengths.extend(len(sample) for sample in made)
                    done.labels.extend(labels)
                    done.batches.append(len(done.lengths))
            nbytes = partial.stat().st_size if done.lengths else 0
        if not nbytes:
            path.unlink()
        done = replace(done, nbytes=nbytes)
        with write_atomically(_note(self.folder, number)) as partial:
            partial.write_text(json.dumps({"fingerprint": self.fingerprint, **vars(done)}))
        return done

    def _batches(
        self, first: int, last: int, skipped: list[tuple[str, str]]
    ) -> Iterator[tuple[list[bytes], list[int]]]:
        """Yield converted samples and their numbers in batches; `skipped` gets those that cannot be converted."""
        made, numbers, held = list[bytes](), list[int](), 0
        for number in range(first, last):
            try:
                sample = self.encode(self.source.read(number))
            except (DecodeError, OSError) as error:
                skipped.append((self.source.keys[number], getattr(error, "strerror", None) or str(error)))
                self.advance()
                continue
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
    return {content["fingerprint"] for note in folder.glob("stripe-*.json") if (content := _content(note))}


def remove_notes(folder: Path) -> None:
    """Remove the notes, once the index has all that they record."""
    for note in folder.glob("stripe-*.json"):
        note.unlink()


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
