"""Packing of a data set: plan the stripes, write them in threads; then measure some images, and write the index.

Stripes are written atomically. A note beside each finished stripe records its origin, so that packing can resume where
it stopped:

    stripe-00003.arrow.5f0c.partial ──(whole)──▶ stripe-00003.arrow + stripe-00003.json    all done: the index; notes go

2 stripes at least, of at most 256 MB; 8 samples of 90 MB:      stripe 0   0 1       stripe 2   4 5
                                                                stripe 1   2 3       stripe 3   6 7

Samples keep their order. So a rank that reads a stretch of them touches few stripes, and all ranks together read from
many stripes at once (swCaffe 5.2: data striped over 32 disks in blocks of 256 MB, so that a batch touches two at most).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.kinds import Bytes, find_kind
from unisono.data.kinds.image import MEAN_SIDE
from unisono.data.pack import INDEX
from unisono.data.pack.index import COLUMNS, About, Index, checksum_of, read_index, schema, to_batch, write_index
from unisono.data.pack.stripe import read_stretch
from unisono.data.sources import Source
from unisono.errors import DecodeError, PackError
from unisono.files import PARTIAL, naming_os_errors, write_atomically
from unisono.tables import parse


def pack(source: Source, folder: Path, options: PackOptions, threads: int, advance: Callable[[], None]) -> Index:
    """Pack `source` into `folder` and return its index; stripes that an earlier run has finished there are kept.

    `advance` is called after each sample. Raises PackError if the folder holds another pack, the disk is full, or no
    sample is valid.
    """
    skipped = [(key, reason) for key, reason in map(as_texts, source.skipped)]
    source = replace(source, keys=as_texts(source.keys), classes=as_texts(source.classes), skipped=skipped)
    fingerprint = _fingerprint(source, options)
    if (existing := _packed(folder, fingerprint)) is not None:
        for _ in range(len(source)):
            advance()
        remove_notes(folder)
        return existing
    stretches = list(pairwise(plan_stripes(source.sizes, options.stripes, options.stripe_bytes)))
    _check_folder(folder, fingerprint, len(stretches))
    kind = find_kind(source.kind)
    writer = StripeWriter(source, folder, fingerprint, lambda sample: kind.encode(sample, options), advance)
    done: dict[int, WrittenStripe] = {}
    try:
        _write_stripes(writer, stretches, threads, done)
        index = _index(source, folder, [done[stripe] for stripe in sorted(done)], fingerprint, options)
        if len(index):
            with write_atomically(folder / INDEX) as partial:
                write_index(index, partial)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise PackError(
            f"{folder}: {reason}; {len(done)} of {len(stretches)} stripes are finished; run the same command again "
            "to resume"
        ) from error
    remove_notes(folder)
    if not len(index):
        reasons = "; ".join(f"{key}: {why}" for key, why in index.about.skipped[:3])
        raise PackError(f"there is no sample to pack{f' ({reasons})' if reasons else ''}")
    return index


def plan_stripes(sizes: Sequence[int] | NDArray[np.int64], stripes: int, stripe_bytes: int) -> list[int]:
    """Return the bounds of stripes: stripe s has the samples bounds[s] to bounds[s + 1] - 1.

    There are at least `stripes` stripes of about equal bytes according to `sizes`, and more if one would exceed
    `stripe_bytes`, but never more than samples. A sample larger than `stripe_bytes` has a stripe of its own.
    """
    samples = len(sizes)
    if samples == 0:
        return [0]
    counted = np.clip(np.asarray(sizes, np.int64), 1, stripe_bytes)
    ends = np.cumsum(counted)
    full = np.flatnonzero(counted == stripe_bytes)
    alone = {*full.tolist(), *(full + 1).tolist()}
    count = min(samples, max(stripes, -(-int(ends[-1]) // stripe_bytes)))
    while True:
        bounds = sorted(alone.union(_cut(ends, count)))
        if all(ends[stop - 1] - ends[start] + counted[start] <= stripe_bytes for start, stop in pairwise(bounds)):
            return bounds
        count = min(samples, count + max(1, count // 8))


def _cut(ends: NDArray[np.int64], count: int) -> list[int]:
    """Return the bounds of `count` stretches of about equal bytes, none empty."""
    samples = len(ends)
    wanted = ends[-1] * np.arange(1, count) // count
    inner = np.searchsorted(ends, wanted, side="left") + 1
    least = np.arange(1, count)
    inner = np.clip(np.maximum.accumulate(inner), least, samples - count + least)
    inner = np.maximum.accumulate(inner - least) + least  # so that each has one at least
    return [0, *inner.tolist(), samples]


BATCH_BYTES = 4 << 20
"""Bytes of samples that share a checksum, the least that is read at once."""


def stripe_name(stripe: int) -> str:
    """Return the file name of a stripe."""
    return f"stripe-{stripe:05d}.arrow"


@dataclass(frozen=True)
class WrittenStripe:
    """Finished stripe: lengths, labels and CRC-32 of its samples, the ends of its batches, and the samples skipped."""

    number: int
    nbytes: int
    lengths: tuple[int, ...]
    labels: tuple[int, ...]
    batches: tuple[int, ...]
    skipped: tuple[tuple[str, str], ...]
    checksums: tuple[int, ...] = ()


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

    def finished(self, stripe: int) -> WrittenStripe | None:
        """Return the stripe if an earlier run finished it from the same samples and options, else None."""
        content, path = _read_note(_note(self.folder, stripe)), self.folder / stripe_name(stripe)
        if content.get("fingerprint") != self.fingerprint:
            return None
        written = parse(WrittenStripe, content, f"the note of {path}", PackError, strict=False)
        complete = len(written.checksums) == len(written.lengths)  # a note of an older release has none
        on_disk = not written.nbytes or (path.is_file() and path.stat().st_size == written.nbytes)
        return written if complete and on_disk else None

    def write(self, stripe: int, first: int, last: int) -> WrittenStripe:
        """Write the samples `first` to `last` - 1 and return the stripe. Raises OSError."""
        source, path = self.source, self.folder / stripe_name(stripe)
        about = {"classes": source.classes, "kind": source.kind, "shape": source.shape}
        columns = schema(source.kind, about, f"{self.fingerprint} {path.name}")
        lengths, labels, batches, skipped = list[int](), list[int](), list[int](), list[tuple[str, str]]()
        checksums = list[int]()
        with write_atomically(path) as partial:
            with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, columns) as writer:
                for made, positions in self._batches(first, last, skipped):
                    batch_labels = [int(source.labels[each]) for each in positions]
                    batch, metadata = to_batch(columns, made, batch_labels, [source.keys[each] for each in positions])
                    writer.write_batch(batch, custom_metadata=metadata)
                    lengths += map(len, made)
                    checksums += map(checksum_of, made)
                    labels += batch_labels
                    batches.append(len(lengths))
            nbytes = partial.stat().st_size if lengths else 0
        if not nbytes:
            path.unlink()
        contents = tuple(lengths), tuple(labels), tuple(batches), tuple(skipped), tuple(checksums)
        done = WrittenStripe(stripe, nbytes, *contents)
        with write_atomically(_note(self.folder, stripe)) as partial:
            partial.write_text(json.dumps({"fingerprint": self.fingerprint, **vars(done)}))
        return done

    def _batches(
        self, first: int, last: int, skipped: list[tuple[str, str]]
    ) -> Iterator[tuple[list[bytes], list[int]]]:
        """Yield converted samples and their positions in batches; `skipped` gets those that cannot be converted."""
        made, positions, held = list[bytes](), list[int](), 0
        for position in range(first, last):
            if self.stop.is_set():
                raise CancelledError
            try:
                if not (sample := self.source.read(position)):
                    raise DecodeError("it is empty")  # noqa: TRY301
                sample = self.encode(sample)
            except (DecodeError, OSError) as error:
                skipped.append((self.source.keys[position], getattr(error, "strerror", None) or str(error)))
            else:
                if made and held + len(sample) > BATCH_BYTES:
                    yield made, positions
                    made, positions, held = [], [], 0
                made.append(sample)
                positions.append(position)
                held += len(sample)
            self.advance()
        if made:
            yield made, positions


def fingerprints(folder: Path) -> set[str]:
    """Return the fingerprints from which the finished stripes in a folder were made."""
    return {content["fingerprint"] for note in folder.glob("stripe-*.json") if (content := _read_note(note))}


def remove_notes(folder: Path) -> None:
    """Remove the notes, once the index has all that they record."""
    for note in folder.glob("stripe-*.json"):
        note.unlink()


def _note(folder: Path, stripe: int) -> Path:
    return folder / stripe_name(stripe).replace(".arrow", ".json")


def _read_note(note: Path) -> dict[str, Any]:
    """Return the content of a note; empty if it is missing or incomplete (a power cut)."""
    try:
        content: dict[str, Any] = json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content


def _write_stripes(
    writer: StripeWriter, stretches: Sequence[tuple[int, int]], threads: int, done: dict[int, WrittenStripe]
) -> None:
    """Write in threads the stripes that an earlier run has not finished. `done` gets each finished one by its number,
    also where an error ends the others."""

    def write_one(stripe: int) -> None:
        first, last = stretches[stripe]
        written = writer.finished(stripe)
        for _ in range(first, last if written else first):
            writer.advance()
        done[stripe] = written or writer.write(stripe, first, last)

    with ThreadPoolExecutor(threads, "pack") as pool:
        futures = [pool.submit(write_one, stripe) for stripe in range(len(stretches))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            writer.stop.set()
            pool.shutdown(cancel_futures=True)
    for future in futures:
        with suppress(CancelledError):  # of a thread that was stopped, or one that did not begin
            future.result()


def _packed(folder: Path, fingerprint: str) -> Index | None:
    """Return the index of the pack in the folder if it is complete and has the same `fingerprint`, else None."""
    with suppress(PackError):
        index = read_index(folder)
        sizes = {path.name: path.stat().st_size for path in folder.glob("stripe-*.arrow")}
        complete = all(sizes.get(name) == nbytes for name, nbytes in index.about.stripes)
        if complete and index.about.made_from == fingerprint:
            return index
    return None


def _check_folder(folder: Path, fingerprint: str, stripes: int) -> None:
    """Create the folder, and remove partial files of a killed process. Raises PackError if it holds something else."""
    if (folder / INDEX).exists():
        raise PackError(f"{folder} holds a pack already; name another folder, or remove it")
    if fingerprints(folder) - {fingerprint}:
        raise PackError(f"{folder} holds a part of another pack, or of this one with other options; remove it first")
    names = {stripe_name(stripe).removesuffix(".arrow") for stripe in range(stripes)}
    partials = {*folder.glob(f"{INDEX}*{PARTIAL}"), *folder.glob(f"stripe-*{PARTIAL}")}
    strange = [path for path in folder.glob("*") if path.name.split(".")[0] not in names and path not in partials]
    if strange:
        raise PackError(f"{folder} is not empty: it has {strange[0].name}; name a new folder")
    with naming_os_errors(f"cannot create {folder}", PackError):
        folder.mkdir(parents=True, exist_ok=True)
        for partial in partials:
            partial.unlink(missing_ok=True)


def as_texts(names: Sequence[str]) -> tuple[str, ...]:
    """Return file names as valid text: those of a file system may be any bytes."""
    return tuple(name.encode(errors="backslashreplace").decode() for name in names)


def _fingerprint(source: Source, options: PackOptions) -> str:
    """Return a fingerprint of the data set and of the options with which it is packed."""
    digest = hashlib.sha256(repr((source.kind, source.classes, source.shape, options, len(source))).encode())
    digest.update("\n".join(source.keys).encode())
    digest.update(np.ascontiguousarray(source.labels).data)
    digest.update(np.ascontiguousarray(source.sizes).data)
    for file in source.files:
        if file.exists():
            digest.update(os.fsencode(f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}"))
    return digest.hexdigest()


def _index(source: Source, folder: Path, stripes: list[WrittenStripe], fingerprint: str, options: PackOptions) -> Index:
    skipped = (*source.skipped, *(entry for stripe in stripes for entry in stripe.skipped))
    kept = [stripe for stripe in stripes if stripe.lengths]
    parts = [np.empty((len(COLUMNS), 0), np.int32)]
    for place, stripe in enumerate(kept):
        samples = np.arange(len(stripe.lengths))
        batch = np.searchsorted(stripe.batches, samples, side="right")
        row = samples - np.array([0, *stripe.batches])[batch]
        columns = np.full(len(samples), place), batch, row, stripe.lengths, stripe.labels
        parts.append(np.array(columns, np.int32))
    arrays = dict(zip(COLUMNS, np.concatenate(parts, axis=1), strict=True))
    files = tuple((stripe_name(stripe.number), stripe.nbytes) for stripe in kept)
    about = About(source.kind, source.classes, source.shape, skipped=skipped, stripes=files, made_from=fingerprint)
    content = checksum_of(np.array([each for stripe in kept for each in stripe.checksums], np.uint32).tobytes())
    about = replace(about, short_side=options.short_side, quality=options.quality, content=f"{content:08x}")
    return statistics(Index(about, **arrays, folder=folder))


@dataclass(frozen=True)
class PackOptions:
    """Options with which a data set is packed."""

    short_side: int = 256
    """Pixels to which longer short sides of images are reduced; 0 reduces none."""
    stripes: int = 32
    """Smallest number of stripe files."""
    stripe_bytes: int = 256_000_000
    """Largest stripe file in bytes."""
    quality: int = 90
    """JPEG quality of images that are encoded again."""


MEASURED_IMAGES = 1_000
"""Approximate number of images that are measured, evenly spread over the pack."""

NEIGHBOURS = 10
"""Number of neighbouring samples that are read together."""


def statistics(index: Index) -> Index:
    """Return the index with the mean image, and mean and std of each channel: one if all images are grey, else three.

    An index of samples of a kind that has no pixels stays as it is.
    """
    if not len(index):
        return index
    kind = find_kind(index.about.kind)
    sums, squares, count, image = np.zeros(3), np.zeros(3), 0, np.zeros((MEAN_SIDE, MEAN_SIDE, 3))
    grey = True
    apart = max(NEIGHBOURS, len(index) * NEIGHBOURS // MEASURED_IMAGES)
    firsts = range(0, len(index), apart)
    for sample in (taken for first in firsts for taken in _samples(index, first, min(len(index), first + NEIGHBOURS))):
        pixels = kind.pixels(sample, index.about.shape)
        if pixels is None:
            return index
        flat = pixels.reshape(-1, pixels.shape[-1]) / 255.0
        grey = grey and flat.shape[1] == 1
        sums += flat.mean(axis=0)
        squares += (flat**2).mean(axis=0)
        small = np.asarray(cv2.resize(pixels, (MEAN_SIDE, MEAN_SIDE), interpolation=cv2.INTER_AREA), np.uint8)
        image += small.reshape(MEAN_SIDE, MEAN_SIDE, -1) / 255.0
        count += 1
    mean = sums / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 1e-8))
    # of files only some were measured: the headers of all tell
    grey = grey and (index.about.shape is not None or all(map(kind.is_grey, _samples(index, 0, len(index)))))
    channels = slice(0, 1 if grey else 3)
    arrays = {"mean": mean[channels], "std": std[channels], "mean_image": (image[..., channels] / count).round(4)}
    facts: dict[str, Any] = {key: tuple(array.ravel().tolist()) for key, array in arrays.items()}
    return replace(index, about=replace(index.about, **facts))


def _samples(index: Index, first: int, last: int) -> Iterator[Bytes]:
    for stretch in read_stretch(index, first, last):
        yield from stretch.each()
