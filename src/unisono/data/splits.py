"""Sizes and splits of data sets, known without loading them and without PyTorch or MPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.data.pack.layout import INDEX
from unisono.data.requirements import check_installed
from unisono.errors import PackError

TRAIN_SAMPLES = {"digits": 1437}
"""Number of training samples of each data set that comes with Unisono."""

TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "testing", "val", "valid", "validation")
"""Folder names of the training set and of the test set of a packed data set."""


def split_folder(folder: Path, names: Sequence[str]) -> Path:
    """Return the first subfolder of `folder` among `names` that holds a pack. Raises PackError if there is none."""
    for name in names:
        if (folder / name / INDEX).is_file():
            return folder / name
    missing = "" if folder.is_dir() else "there is no such folder; "
    raise PackError(
        f"{folder} has no pack named {' or '.join(names)}: {missing}create it with unisono pack SOURCE {folder}"
    )


def train_samples(name: str, pack: str) -> int:
    """Return the number of training samples of a data set or of a pack. Raises PackError if it cannot be read."""
    if not pack:
        return TRAIN_SAMPLES[name]
    check_installed()
    from unisono.data.pack.index import read_index  # noqa: PLC0415  Arrow takes a while, and only packs need it

    return len(read_index(split_folder(Path(pack), TRAIN_SPLITS)))
