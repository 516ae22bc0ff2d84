"""Tar files: WebDataset shards, or folders of classes in a tar.

    shard-000.tar    0001.jpg  0001.cls     the label beside the image, as a number or a name
                     0002.jpg  0002.json    or as "label", "cls" or "class" in JSON
    data.tar         train/cat/1.jpg        or the folder that has it; within a split, the outer one

A split (train, test, ...) is a folder in a tar, a word in the tar's name, or the folder of the tars.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from unisono.data.sources.source import FILE_KINDS, SPLITS, Source, common_kind, kind_of, number_classes
from unisono.errors import PackError

LABELS = ("label", "cls", "class")
"""Keys for the label in JSON."""


class _TarEntry(NamedTuple):
    tar: Path
    name: str
    offset: int
    size: int
    label: str


def find(path: Path) -> dict[str, Source] | None:
    """Return the splits of a tar file, or of all tar files in a folder; None if there is no tar file."""
    tars = _tars(path)
    if not tars:
        return None
    splits: dict[str, list[_TarEntry]] = {}
    for tar in tars:
        for member in _members(tar):
            words = [] if tar == path else [*re.split(r"[-_.]", tar.name), tar.parent.name]
            splits.setdefault(_split([*PurePosixPath(member.name).parts[:-1], *words]), []).append(member)
    if not splits:
        raise PackError(f"{path} has no {FILE_KINDS} file")
    if "" in splits and len(splits) > 1:
        odd = splits.pop("")[0]
        raise PackError(
            f"{path}: {odd.name} in {odd.tar.name} is in no split, but others are in {', '.join(sorted(splits))}"
        )
    return {name: _source(members, path) for name, members in splits.items()}


def _tars(path: Path) -> list[Path]:
    if path.is_dir():
        inner = [tar for tar in sorted(path.glob("*/*.tar")) if tar.parent.name in SPLITS]
        return sorted(path.glob("*.tar")) or inner
    return [path] if {".tar", ".tgz"} & set(path.suffixes) else []


def _split(words: Sequence[str]) -> str:
    """Return the split that one of these words names: folders in a tar, words of the tar's name, its folder."""
    return next((word for word in words if word in SPLITS), "")


def _source(members: Sequence[_TarEntry], path: Path) -> Source:
    kind = common_kind([member.name for member in members], path)
    classes, labels = number_classes([member.label for member in members])
    sizes = np.array([member.size for member in members], np.int64)

    def read(number: int) -> bytes:
        member = members[number]
        with member.tar.open("rb") as file:
            file.seek(member.offset)
            return file.read(member.size)

    keys = [f"{member.tar.name}/{member.name}" for member in members]
    tars = list(dict.fromkeys(member.tar for member in members))
    return Source(kind, classes, keys, labels, sizes, read, None, tars)


def _members(path: Path) -> list[_TarEntry]:
    try:
        with tarfile.open(path, "r:") as tar:
            entries = [entry for entry in tar.getmembers() if entry.isfile()]
            beside = {str(PurePosixPath(entry.name)): entry for entry in entries}
            samples = [entry for entry in entries if kind_of(entry.name)]
            return [
                _TarEntry(path, entry.name, entry.offset_data, entry.size, _label(tar, entry.name, beside))
                for entry in samples
            ]
    except tarfile.ReadError as error:
        raise PackError(f"cannot read {path} as a tar file ({error}); if it is compressed, unpack it first") from error


def _label(tar: tarfile.TarFile, name: str, beside: dict[str, tarfile.TarInfo]) -> str:
    place = PurePosixPath(name)
    stem = str(place.with_name(place.name.split(".")[0]))
    for ending, read in ((".cls", str.strip), (".json", _in_json)):
        if (entry := beside.get(stem + ending)) is not None and (file := tar.extractfile(entry)) is not None:
            try:
                label = read(file.read().decode())
            except (ValueError, TypeError) as error:
                raise PackError(f"{tar.name!s}: {stem}{ending} holds no label: {error}") from error
            if label:
                return label
    folders = place.parts[:-1]
    split = next((number for number, folder in enumerate(folders) if folder in SPLITS), None)
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
