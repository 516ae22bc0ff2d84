"""Sizes and parts of the data sets, known without loading them and without PyTorch or MPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.data.pack.layout import INDEX
from unisono.errors import PackError

SAMPLES = {"digits": 1437}
"""Number of training samples of each data set that comes with Unisono."""

TRAIN = ("train", "training")
HELD_OUT = ("test", "testing", "val", "valid", "validation")
"""Folder names of the training set and of the test set of a packed data set."""


def part_of(folder: Path, names: Sequence[str]) -> Path:
    """Return the first subfolder of `folder` among `names` that holds a pack. Raises PackError if there is none."""
    for name in names:
        if (folder / name / INDEX).is_file():
            return folder / name
    there = "" if folder.is_dir() else "there is no such folder; "
    raise PackError(f"{folder} has no pack named {' or '.join(names)}: {there}unisono pack SOURCE {folder} makes it")


def samples_of(name: str, pack: str) -> int:
    """Return the number of training samples of a data set or of a pack. Raises PackError if it cannot be read."""
    if not pack:
        return SAMPLES[name]
    from unisono.data.pack.index import read_index  # noqa: PLC0415  Arrow takes a while, and only packs need it

    return len(read_index(part_of(Path(pack), TRAIN)))
