"""Packs: data sets as few big files, Arrow IPC stripes, with an index of every sample's place.

    PACK/train    index.arrow  stripe-00000.arrow  stripe-00001.arrow  ...
    PACK/test     ...

Splits are known without PyTorch, MPI and Arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from unisono.errors import PackError, UsageError, install_command

INDEX = "index.arrow"

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
    if (folder / INDEX).is_file():
        remedy = f"or pack each of them into {folder}/train and {folder}/test"
        if folder.name in (*TRAIN_SPLITS, *TEST_SPLITS):
            remedy = f"or give {folder.parent}"
        raise PackError(f"{folder} is one pack without splits: pack a folder that has train/ and test/, {remedy}")
    missing = "" if folder.is_dir() else "there is no such folder; "
    raise PackError(
        f"{folder} has no pack named {' or '.join(names)}: {missing}create it with unisono pack SOURCE {folder}, or "
        "name another folder: data.pack of a recipe, or of recipe.toml in the folder of a run"
    )


def train_samples(name: str, pack: str) -> int:
    """Return the number of training samples of a data set or of a pack. Raises PackError if it cannot be read."""
    if not pack:
        return TRAIN_SAMPLES[name]
    check_installed()
    from unisono.data.pack.index import read_index  # noqa: PLC0415  Arrow takes a while, and only packs need it

    return len(read_index(split_folder(Path(pack), TRAIN_SPLITS)))


PACKAGES = {"pyarrow": "pyarrow", "PIL": "pillow", "cv2": "opencv-python-headless"}
"""Modules, and the packages that have them: the extra `data` (`pyproject.toml`)."""


def check_installed() -> None:
    """Raise UsageError unless the packages of the extra `data` are installed; called before they are imported."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"packs need {', '.join(missing)}: {install_command('data')}")
