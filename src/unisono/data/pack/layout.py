"""Layout of a packed data set on disk, known without PyTorch, MPI and Arrow: splits, and the samples of each stripe.

    PACK/train    index.arrow  stripe-00000.arrow  stripe-00001.arrow  ...
    PACK/test     ...

    2 stripes at least, of at most 256 MB; 8 samples of 90 MB:      stripe 0   0 1       stripe 2   4 5
                                                                    stripe 1   2 3       stripe 3   6 7

Samples keep their order. So a rank that reads a stretch of them touches few stripes, and all ranks together read from
many stripes at once (swCaffe 5.2: data striped over 32 disks in blocks of 256 MB, so that a batch touches two at most).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.errors import PackError, UsageError, install_command

INDEX = "index.arrow"
BATCH_BYTES = 4 << 20
"""Bytes of samples that share a checksum, the least that is read at once."""


def stripe_name(number: int) -> str:
    """Return the file name of a stripe."""
    return f"stripe-{number:05d}.arrow"


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


PACKAGES = {"pyarrow": "pyarrow", "PIL": "pillow", "cv2": "opencv-python-headless"}
"""Modules, and the packages that have them: the extra `data` (`pyproject.toml`)."""


def check_installed() -> None:
    """Raise UsageError unless the packages of the extra `data` are installed; called before they are imported."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"packs need {', '.join(missing)}: {install_command('data')}")
