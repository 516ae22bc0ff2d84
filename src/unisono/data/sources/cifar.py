"""Files of CIFAR-10 and CIFAR-100: the binary ones and those for Python.

    data_batch_1.bin ... test_batch.bin         a label, then 1,024 red, green and blue values; 10,000 times
    train.bin, test.bin                         CIFAR-100: a coarse label before the fine one
    data_batch_1 ... test_batch, train, test    the same as pickled arrays

Only arrays are unpickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.sources import Source, Splits, raw_source
from unisono.errors import PackError

SIDE = 32
PIXELS = 3 * SIDE * SIDE

Rows = tuple[NDArray[np.uint8], NDArray[np.int64]]


def find(path: Path) -> Splits | None:
    """Return the splits in a folder of CIFAR's files; None if it has none."""
    for ending, read in ((".bin", _binary), ("", _pickled)):
        batches = [path / f"data_batch_{number}{ending}" for number in range(1, 6)]
        ten = [file for file in batches if file.is_file()]
        if ten and ten != batches:
            missing = ", ".join(file.name for file in batches if file not in ten)
            raise PackError(f"{path} has no {missing}: training has five batches; unpack the archive again")
        splits = {"train": ten or [path / f"train{ending}"], "test": [path / f"test{'_batch' * bool(ten)}{ending}"]}
        present = {name: files for name, files in splits.items() if all(file.is_file() for file in files)}
        if present and (ten or any(path.glob("*meta*")) or any(path.glob("*label_names*"))):
            return {
                name: _source([read(file, not ten) for file in files], path, files) for name, files in present.items()
            }
    return None


def _source(rows: list[Rows], path: Path, files: list[Path]) -> Source:
    images = np.concatenate([pixels for pixels, _ in rows]).reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    labels = np.concatenate([labels for _, labels in rows])
    most = int(labels.max(initial=-1))
    classes = _names(path) or tuple(str(number) for number in range(most + 1))
    if most >= len(classes):
        raise PackError(f"{path} has the label {most}, but {len(classes)} classes")
    return raw_source(images, labels, classes, path.name, files)


def _binary(path: Path, coarse: bool) -> Rows:
    content = np.frombuffer(path.read_bytes(), np.uint8)
    row = 1 + coarse + PIXELS
    if len(content) % row:
        raise PackError(f"{path} has {len(content)} bytes, not a multiple of {row}")
    rows = content.reshape(-1, row)
    return rows[:, -PIXELS:], rows[:, int(coarse)].astype(np.int64)


def _pickled(path: Path, coarse: bool) -> Rows:
    with _unpickled(path) as content:
        labels = np.asarray(content[b"fine_labels" if coarse else b"labels"], np.int64)
        pixels = np.asarray(content[b"data"], np.uint8).reshape(-1, PIXELS)
        if len(pixels) != len(labels):
            raise ValueError(f"{len(pixels)} images, but {len(labels)} labels")
        return pixels, labels


def _names(path: Path) -> tuple[str, ...]:
    for name in ("batches.meta.txt", "fine_label_names.txt"):
        if (path / name).is_file():
            return tuple((path / name).read_text().split())
    for name, key in (("batches.meta", b"label_names"), ("meta", b"fine_label_names")):
        if (path / name).is_file():
            with _unpickled(path / name) as content:
                return tuple(each.decode() for each in content[key])
    return ()


@contextmanager
def _unpickled(path: Path) -> Iterator[Any]:
    """Yield the content of a file, and turn any error in it into a PackError that names the file."""
    try:
        yield _Arrays(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise PackError(f"{path} is no CIFAR file: {error}") from error


class _Arrays(pickle.Unpickler):
    """Unpickler of arrays and their components alone, since a pickle could run any other code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.partition(".")[0], name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy", "_reconstruct")}:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")
