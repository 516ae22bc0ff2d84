"""Tar files: WebDataset shards, or folders of classes in a tar.

    shard-000.tar    0001.jpg  0001.cls     the label beside the image, as a number or a name
                     0002.jpg  0002.json    or as "label", "cls" or "class" in JSON
    data.tar         train/cat/1.jpg        or the folder that has it; within a split, the outer one

A split (train, test, ...) is a folder in a tar, a word in the tar's name, or the folder of the tars. Of members with
the same name, the last counts, as where a tar is unpacked. Links are skipped, and what belongs to a sample with such a
label: 0001.seg.png.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from unisono.data.sources import ENDINGS, FILE_KINDS, Source, Splits, kind_of, labelled_source, split_of
from unisono.errors import PackError

LABELS = ("label", "cls", "class")
"""Keys for the label in JSON."""


class _TarEntry(NamedTuple):
    """Sample in a tar file."""

    tar: Path
    name: str
    offset: int
    size: int
    label: str
    reason: str
    """Why it cannot be packed; empty where it can."""

    @property
    def key(self) -> str:
        return f"{self.tar.name}/{self.name}"


def find(path: Path) -> Splits | None:
    """Return the splits of a tar file, or of all tar files in a folder; None if there is no tar file."""
    tars = _tars(path)
    if not tars:
        return None
    good, skipped = defaultdict[str, list[_TarEntry]](list), defaultdict[str, list[tuple[str, str]]](list)
    empty = list[str]()
    for tar in tars:
        words = [] if tar == path else [*re.split(r"[-_.]", tar.name), tar.parent.name]
        entries, unused = _content(tar)
        empty += unused
        for entry in entries:
            folders = PurePosixPath(entry.name).parts[:-1]
            split = split_of((*folders, *words))
            if entry.reason:
                skipped[split].append((entry.key, entry.reason))
            else:
                good[split].append(entry)
    if not good:
        raise PackError(f"{path} has no {FILE_KINDS} file")
    if "" in good and len(good) > 1:
        odd = good.pop("")[0]
        raise PackError(
            f"{path}: {odd.name} in {odd.tar.name} is in no split, but others are in {', '.join(sorted(good))}"
        )
    for name in [name for name in skipped if name not in good]:  # all samples of this split are skipped
        skipped[next(iter(good))] += skipped.pop(name)
    return {name: replace(_source(entries, path), skipped=skipped[name], empty=empty) for name, entries in good.items()}


def _tars(path: Path) -> list[Path]:
    if path.is_dir():
        inner = [tar for tar in sorted(path.glob("*/*.tar")) if split_of([tar.parent.name])]
        return sorted(path.glob("*.tar")) or inner
    return [path] if {".tar", ".tgz"} & set(path.suffixes) else []


def _source(members: Sequence[_TarEntry], path: Path) -> Source:
    def read(number: int) -> bytes:
        member = members[number]
        with member.tar.open("rb") as file:
            file.seek(member.offset)
            return file.read(member.size)

    keys, labels, sizes = zip(*((member.key, member.label, member.size) for member in members), strict=True)
    return labelled_source(keys, labels, sizes, read, path, list(dict.fromkeys(member.tar for member in members)))


def _content(path: Path) -> tuple[list[_TarEntry], list[str]]:
    """Return the samples of a tar file, and the names of its folders without files."""
    try:
        with tarfile.open(path, "r:") as tar:
            members = tar.getmembers()
            _check_end(path, tar.offset)
            newest = {str(PurePosixPath(entry.name)): entry for entry in members}
            beside = {name: entry for name, entry in newest.items() if entry.isfile()}
            samples = list[_TarEntry]()
            for entry in members:
                if not entry.isdir() and kind_of(entry.name):
                    reason = _why_skipped(entry, newest)
                    label = "" if reason else _label(tar, entry.name, beside)
                    samples.append(_TarEntry(path, entry.name, entry.offset_data, entry.size, label, reason))
    except tarfile.ReadError as error:
        raise PackError(f"cannot read {path} as a tar file ({error}); if it is compressed, unpack it first") from error
    full = {folder for name, entry in newest.items() if not entry.isdir() for folder in PurePosixPath(name).parents}
    folders = [PurePosixPath(name) for name, entry in newest.items() if entry.isdir()]
    return samples, [one.name for one in folders if one.name and not split_of([one.name]) and one not in full]


def _check_end(path: Path, end: int) -> None:
    """Raise PackError unless there are zeros from the byte `end` on, and no more: tarfile ends at any bad header."""
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read(tarfile.BLOCKSIZE)
        if not rest or any(rest) or any(map(any, iter(lambda: file.read(1 << 20), b""))):
            raise PackError(
                f"{path} has neither a member nor its end alone at byte {end}: it is damaged, cut short, without its "
                "end, or several tar files in one; fetch or make it again"
            )


def _why_skipped(entry: tarfile.TarInfo, newest: Mapping[str, tarfile.TarInfo]) -> str:
    """Return why a sample cannot be packed; empty where it can. `newest` has the last member of each name."""
    if newest[str(PurePosixPath(entry.name))] is not entry:
        return "a later member has the same name"
    if entry.issym() or entry.islnk():
        return f"it is a link, to {entry.linkname}"
    if not entry.isfile() or entry.issparse():
        return "it is no plain file"
    place, stem = PurePosixPath(entry.name), _stem(entry.name)
    plain = (stem + letters for ending in ENDINGS for letters in (ending, ending.upper()))
    others = [name for name in plain if name in newest]
    if others and stem != str(place.with_suffix("")) and {stem + ".cls", stem + ".json"} & newest.keys():
        return f"it belongs to {others[0]}"  # as a mask does
    return ""


def _stem(name: str) -> str:
    """Return a name up to the first dot, as WebDataset does: that of a sample, and of what belongs to it."""
    place = PurePosixPath(name)
    return str(place.with_name(place.name.split(".")[0]))


def _label(tar: tarfile.TarFile, name: str, beside: dict[str, tarfile.TarInfo]) -> str:
    stem = _stem(name)
    for ending, read in ((".cls", str.strip), (".json", _in_json)):
        if (entry := beside.get(stem + ending)) is not None and (file := tar.extractfile(entry)) is not None:
            try:
                label = read(file.read().decode())
            except (ValueError, TypeError, RecursionError) as error:
                raise PackError(f"{tar.name!s}: {stem}{ending} holds no label: {error}") from error
            if label:
                return label
    folders = PurePosixPath(name).parts[:-1]
    split = next((number for number, folder in enumerate(folders) if split_of([folder])), None)
    inside = folders if split is None else folders[split + 1 :]
    if inside:
        return inside[-1] if split is None else inside[0]
    raise PackError(f"{tar.name!s}: {name} has no label: neither {stem}.cls, nor {stem}.json, nor a folder")


def _in_json(text: str) -> str:
    """Return the label in a JSON object, or "" if it has none. Raises ValueError or TypeError if it is no object."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise TypeError("it is no object")
    return next((str(content[key]) for key in LABELS if content.get(key) is not None), "")
