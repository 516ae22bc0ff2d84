from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from unisono.data.kinds import RAW
from unisono.data.sources.idx import find
from unisono.errors import PackError

PICTURES = np.arange(4 * 3 * 5, dtype=np.uint8).reshape(4, 3, 5)
LABELS = np.array([2, 0, 11, 2], np.uint8)


def content(array: NDArray[np.uint8]) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def lay(folder: Path, part: str = "train", dot: str = "-", ending: str = "") -> Path:
    """The two files of a part; the one with images."""
    for kind, array in (("images", PICTURES), ("labels", LABELS)):
        file = content(array)
        path = folder / f"{part}-{kind}{dot}idx{array.ndim}-ubyte{ending}"
        path.write_bytes(gzip.compress(file) if ending else file)
    return folder / f"{part}-images{dot}idx3-ubyte{ending}"


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("dot", ["-", "."])
def test_images_and_labels_are_read(tmp_path: Path, dot: str, ending: str) -> None:
    lay(tmp_path, dot=dot, ending=ending)
    sources = find(tmp_path)
    assert sources is not None
    assert list(sources) == ["train"]
    source = sources["train"]
    assert source.kind == RAW
    assert source.shape == (3, 5)
    assert source.labels.tolist() == [2, 0, 11, 2]
    assert source.sizes.tolist() == [15] * 4
    assert [source.read(index) for index in range(4)] == [picture.tobytes() for picture in PICTURES]
    assert len(set(source.keys)) == 4


def test_classes_are_numbers_in_their_order(tmp_path: Path) -> None:
    lay(tmp_path)
    sources = find(tmp_path)
    assert sources is not None
    assert sources["train"].classes == tuple(str(label) for label in range(12))


def test_parts_are_train_and_test_or_as_they_are_called(tmp_path: Path) -> None:
    for part in ("train", "t10k", "emnist-letters-test"):
        lay(tmp_path, part, ending=".gz")
    sources = find(tmp_path)
    assert sources is not None
    assert sorted(sources) == ["emnist-letters-test", "test", "train"]


def test_one_file_of_images_can_be_named(tmp_path: Path) -> None:
    lay(tmp_path)
    sources = find(lay(tmp_path, "t10k"))
    assert sources is not None
    assert list(sources) == [""]
    assert len(sources[""]) == 4


def test_other_files_and_folders_are_none(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    (tmp_path / "cat.jpg").write_bytes(b"")
    assert find(tmp_path / "cat.jpg") is None


def test_images_without_labels_are_refused_with_the_name_that_is_missing(tmp_path: Path) -> None:
    lay(tmp_path, ending=".gz")
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(PackError, match=r"train-labels-idx1-ubyte\.gz is missing"):
        find(tmp_path)


def test_more_images_than_labels_are_refused_with_both_numbers(tmp_path: Path) -> None:
    lay(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(content(LABELS[:3]))
    with pytest.raises(PackError, match="4 images, but train-labels-idx1-ubyte has 3 labels"):
        find(tmp_path)


def test_a_file_that_ends_too_early_is_refused_with_what_there_is(tmp_path: Path) -> None:
    images = lay(tmp_path)
    images.write_bytes(images.read_bytes()[:-7])
    with pytest.raises(PackError, match="has 53 bytes of data, but should have 60"):
        find(tmp_path)


@pytest.mark.parametrize("head", [b"", b"\0\0\10\1", b"\0\0\15\3", b"\1\0\10\3"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, head: bytes) -> None:
    images = lay(tmp_path)
    images.write_bytes(head and head + images.read_bytes()[len(head) :])
    with pytest.raises(PackError, match="no IDX file of bytes in 3 dimensions"):
        find(tmp_path)


@pytest.mark.parametrize("damage", ["short", "words", "changed"])
def test_a_compressed_file_that_is_damaged_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    images = lay(tmp_path, ending=".gz")
    packed = images.read_bytes()
    middle = len(packed) // 2
    changed = packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :]
    images.write_bytes({"short": packed[:-12], "words": b"these are words", "changed": changed}[damage])
    with pytest.raises(PackError, match=r"cannot read .*train-images-idx3-ubyte\.gz"):
        find(tmp_path)
