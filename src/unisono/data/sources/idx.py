"""IDX files, as in MNIST and its successors: images in one file, labels in another, compressed or not.

    train-images-idx3-ubyte.gz   train-labels-idx1-ubyte.gz      t10k-images-idx3-ubyte.gz   t10k-labels-idx1-ubyte.gz

Format of a file: two zero bytes, the type (8: bytes), the number of dimensions, each dimension in 4 bytes, big-endian,
then the data.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.data.sources import Source, Splits, raw_source, reading
from unisono.errors import PackError

NAMES = {"train": "train", "t10k": "test"}


def find(path: Path) -> Splits | None:
    """Return the splits in a folder, or the split whose file of images is `path`; None if there is none."""
    if path.is_dir():
        files = sorted(file for file in path.glob("*-images*idx3-ubyte*") if file.is_file())
        starts = [file.name.split("-images")[0] for file in files]
        return {NAMES.get(start, start): _read(file) for start, file in zip(starts, files, strict=True)} or None
    return {"": _read(path)} if "-images" in path.name and "idx3-ubyte" in path.name else None


def _read(path: Path) -> Source:
    labels = path.with_name(path.name.replace("-images", "-labels").replace("idx3", "idx1"))
    if not labels.exists():
        raise PackError(f"{path} has no labels beside it: {labels.name} is missing")
    images, targets = _array(path, 3), _array(labels, 1).astype(np.int64)
    if len(images) != len(targets):
        raise PackError(f"{path} has {len(images)} images, but {labels.name} has {len(targets)} labels")
    classes = tuple(str(number) for number in range(int(targets.max(initial=-1)) + 1))
    return raw_source(images, targets, classes, path.name.split(".")[0], [path, labels])


def _array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    with reading(path, EOFError, zlib.error):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes((0, 0, 8, dimensions)):
        raise PackError(f"{path} is no IDX file of bytes in {dimensions} dimensions")
    shape = tuple(int(length) for length in np.frombuffer(content, ">i4", dimensions, 4))
    if len(content) != head + math.prod(shape):
        raise PackError(f"{path} has {len(content) - head} bytes of data, but should have {math.prod(shape)}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
