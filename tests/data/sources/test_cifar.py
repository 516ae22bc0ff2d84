from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from unisono.data.kinds import RAW
from unisono.data.sources.cifar import find
from unisono.errors import PackError

NAMES = tuple(f"class {label}".replace(" ", "_") for label in range(10))


def rows(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Pictures as the files have them: 1,024 red, then green, then blue values."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8)


def picture(row: NDArray[np.uint8]) -> bytes:
    """One pixel after the other: height, width, colours."""
    return bytes(int(row[1024 * color + pixel]) for pixel in range(1024) for color in range(3))


def binary(path: Path, pixels: NDArray[np.uint8], *labels: list[int]) -> None:
    path.write_bytes(np.concatenate([np.array(labels, np.uint8).T, pixels], axis=1).tobytes())


def pickled(path: Path, **content: Any) -> None:
    """As the files for Python are: an old format, with keys that are bytes."""
    path.write_bytes(pickle.dumps({key.encode(): value for key, value in content.items()}, protocol=2))


def batches(folder: Path, ending: str = "") -> Path:
    """Return the first batch of a folder that has the other four."""
    for batch in (2, 3, 4, 5):
        path = folder / f"data_batch_{batch}{ending}"
        path.write_bytes(bytes(3073) if ending else pickle.dumps({b"data": rows(1), b"labels": [0]}, protocol=2))
    return folder / f"data_batch_1{ending}"


def test_cifar_10_in_binary(tmp_path: Path) -> None:
    for batch in (1, 2, 3, 4, 5):
        binary(tmp_path / f"data_batch_{batch}.bin", rows(2, batch), [batch, 0])
    binary(tmp_path / "test_batch.bin", rows(3), [9, 8, 7])
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    sources = find(tmp_path)
    assert sources is not None
    assert sorted(sources) == ["test", "train"]
    train, test = sources["train"], sources["test"]
    assert train.kind == RAW
    assert train.shape == (32, 32, 3)
    assert train.classes == test.classes == NAMES
    assert train.labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert test.labels.tolist() == [9, 8, 7]
    assert train.sizes.tolist() == [3072] * 10
    assert train.read(4) == picture(rows(2, 3)[0])
    assert test.read(2) == picture(rows(3)[2])
    assert len(set(train.keys)) == 10


def test_cifar_10_for_python(tmp_path: Path) -> None:
    for batch in (1, 2, 3, 4, 5):
        pickled(tmp_path / f"data_batch_{batch}", data=rows(2, batch), labels=[batch, 0], batch_label=b"training")
    pickled(tmp_path / "test_batch", data=rows(3), labels=[9, 8, 7])
    pickled(tmp_path / "batches.meta", label_names=[name.encode() for name in NAMES])
    sources = find(tmp_path)
    assert sources is not None
    assert sources["train"].classes == NAMES
    assert sources["train"].labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert sources["train"].read(4) == picture(rows(2, 3)[0])
    assert sources["test"].labels.tolist() == [9, 8, 7]


def test_arrays_pickled_by_an_older_numpy_are_read(tmp_path: Path) -> None:
    pickled(batches(tmp_path), data=rows(2), labels=[3, 4])
    path = tmp_path / "data_batch_1"
    content = path.read_bytes()
    assert b"numpy._core" in content
    path.write_bytes(content.replace(b"numpy._core", b"numpy.core"))
    sources = find(tmp_path)
    assert sources is not None
    assert sources["train"].read(1) == picture(rows(2)[1])


def test_cifar_100_in_binary(tmp_path: Path) -> None:
    """The fine label is the second one."""
    binary(tmp_path / "train.bin", rows(2), [1, 2], [99, 50])
    binary(tmp_path / "test.bin", rows(1), [3], [7])
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"c{label}" for label in range(100)))
    sources = find(tmp_path)
    assert sources is not None
    assert sources["train"].labels.tolist() == [99, 50]
    assert sources["test"].labels.tolist() == [7]
    assert sources["test"].classes[7] == "c7"
    assert sources["train"].read(1) == picture(rows(2)[1])


def test_cifar_100_for_python(tmp_path: Path) -> None:
    pickled(tmp_path / "train", data=rows(2), fine_labels=[99, 50], coarse_labels=[1, 2])
    pickled(tmp_path / "test", data=rows(1), fine_labels=[7], coarse_labels=[3])
    pickled(tmp_path / "meta", fine_label_names=[f"c{label}".encode() for label in range(100)])
    sources = find(tmp_path)
    assert sources is not None
    assert sources["train"].labels.tolist() == [99, 50]
    assert sources["test"].classes[7] == "c7"


def test_missing_batches_are_refused_with_their_names(tmp_path: Path) -> None:
    batches(tmp_path, ".bin").write_bytes(b"")
    (tmp_path / "data_batch_3.bin").unlink()
    (tmp_path / "data_batch_5.bin").unlink()
    with pytest.raises(PackError, match=r"has no data_batch_3\.bin, data_batch_5\.bin"):
        find(tmp_path)


def test_without_names_classes_are_numbers(tmp_path: Path) -> None:
    binary(batches(tmp_path, ".bin"), rows(2), [3, 1])
    sources = find(tmp_path)
    assert sources is not None
    assert list(sources) == ["train"]
    assert sources["train"].classes == ("0", "1", "2", "3")


def test_other_files_and_folders_are_none(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    (tmp_path / "train").mkdir()
    (tmp_path / "test").write_bytes(b"these are words")
    assert find(tmp_path) is None
    assert find(tmp_path / "test") is None


def test_a_file_that_ends_too_early_is_refused_with_its_bytes(tmp_path: Path) -> None:
    binary(batches(tmp_path, ".bin"), rows(2), [3, 1])
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(PackError, match=r"data_batch_1.bin has 6136 bytes, not a multiple of 3073"):
        find(tmp_path)


class Evil:
    """What a pickle can do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._folder,)


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
def test_a_pickle_of_anything_but_arrays_is_refused_and_does_nothing(tmp_path: Path, name: str) -> None:
    pickled(batches(tmp_path), data=rows(1), labels=[1])
    pickled(tmp_path / name, data=rows(1), labels=[1], label_names=Evil(tmp_path / "made"))
    with pytest.raises(PackError, match=rf"{name} is no CIFAR file: it holds a "):
        find(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["data_batch_1", "batches.meta"])
@pytest.mark.parametrize(
    "content",
    [b"", b"these are words", pickle.dumps([1, 2]), pickle.dumps({b"data": 1}), pickle.dumps({b"x": b"y" * 99})[:-40]],
)
def test_a_file_of_something_else_is_refused_with_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    pickled(batches(tmp_path), data=rows(1), labels=[1])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PackError, match=f"{name} is no CIFAR file"):
        find(tmp_path)


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    pickled(batches(tmp_path), data=rows(2)[:, :100], labels=[1, 2])
    with pytest.raises(PackError, match="data_batch_1 is no CIFAR file"):
        find(tmp_path)


def test_more_images_than_labels_are_refused(tmp_path: Path) -> None:
    pickled(batches(tmp_path), data=rows(3), labels=[1, 2])
    with pytest.raises(PackError, match="data_batch_1 is no CIFAR file: 3 images, but 2 labels"):
        find(tmp_path)


def test_labels_without_a_name_are_refused(tmp_path: Path) -> None:
    binary(batches(tmp_path, ".bin"), rows(2), [3, 1])
    (tmp_path / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(PackError, match="label 3, but 2 classes"):
        find(tmp_path)
