import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.kinds import AUDIO, IMAGE, RAW
from unisono.data.sources import Source, find, kind_of, labelled_source, number_classes, unify_classes, walk
from unisono.data.sources.texts import files_by_split
from unisono.errors import PackError


def source(*names: str) -> Source:
    """A sample of each of these classes."""
    classes, labels = number_classes(names)
    return Source(RAW, classes, names, labels, np.ones(len(names), np.int64), lambda index: b"x", (1, 1))


@pytest.mark.parametrize(
    "name",
    [
        "a.jpg",
        "a.JPEG",
        "b/a.x.png",
        "a.bmp",
        "a.webp",
        "a.gif",
        "a.tif",
        "a.TIFF",
        "a.pgm",
        "a.jfif",
        "a.jpe",
        "a.avif",
    ],
)
def test_images_are_known_by_their_names(name: str) -> None:
    assert kind_of(name) == IMAGE


def test_audio_files_are_known_by_their_names() -> None:
    assert kind_of("a.wav") == kind_of("b/a.WAV") == AUDIO


@pytest.mark.parametrize("name", ["a.txt", "jpg", "a", "a.jpg.gz", "", "._a.jpg", "cat/._a.jpg", ".jpg"])
def test_other_and_hidden_files_hold_nothing_that_is_known(name: str) -> None:
    assert kind_of(name) is None


def test_images_and_audio_files_are_not_packed_together() -> None:
    def kind_of_all(*names: str) -> str:
        return labelled_source(names, names, [1] * len(names), lambda index: b"x", Path("data"), []).kind

    assert kind_of_all("a.jpg", "b.png") == IMAGE
    assert kind_of_all("a.wav") == AUDIO
    with pytest.raises(PackError, match=r"data has images and audio files; pack them one by one"):
        kind_of_all("a.jpg", "b.wav")


def test_classes_are_in_the_order_of_their_names_or_numbers() -> None:
    assert number_classes(["dog", "cat", "dog"])[0] == ("cat", "dog")
    assert number_classes(["10", "9", "0"])[0] == ("0", "9", "10")
    assert number_classes(["10", "9", "x"])[0] == ("10", "9", "x")
    assert number_classes([])[0] == ()


def test_the_same_number_written_in_two_ways_is_two_classes_in_one_order() -> None:
    for label in range(1, 40):
        assert number_classes([f"{label}", f"0{label}"])[0] == (f"0{label}", f"{label}")


@given(st.lists(st.text("0123ab", min_size=1, max_size=3)))
def test_the_number_of_a_class_is_its_place_among_the_classes(names: list[str]) -> None:
    classes, labels = number_classes(names)
    assert [classes[label] for label in labels] == names
    assert set(classes) == set(names)
    assert len(classes) == len(set(classes))
    assert labels.dtype == np.int64


def test_a_source_is_as_long_as_its_samples() -> None:
    assert len(source("a", "b", "a")) == 3


def test_parts_get_the_classes_of_all_of_them() -> None:
    parts = unify_classes({"train": source("a", "b", "c", "b"), "test": source("c", "a"), "val": source()})
    assert {part.classes for part in parts.values()} == {("a", "b", "c")}
    assert [part.labels.tolist() for part in parts.values()] == [[0, 1, 2, 1], [2, 0], []]
    numbers = unify_classes({"train": source("9", "10"), "test": source("11", "10")})
    assert numbers["test"].classes == ("9", "10", "11")
    assert numbers["test"].labels.tolist() == [2, 1]


def test_parts_whose_classes_are_the_same_stay_as_they_are() -> None:
    """Names that a data set tells may be in any order."""
    part = Source(RAW, ("dog", "cat"), ["0"], np.zeros(1, np.int64), np.ones(1, np.int64), lambda index: b"x", (1, 1))
    parts = {"train": part, "test": part}
    assert unify_classes(parts) == parts
    assert unify_classes({"": part})[""] is part


def test_links_are_followed_but_not_into_what_leads_to_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("data/a", "data/b", "data/b/.hidden", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "0.txt").write_text(name)
    for name, target in (("a/l", data / "b"), ("b/l", data / "a"), ("a/up", tmp_path), ("c", tmp_path / "elsewhere")):
        (data / name).symlink_to(target)
    files = ["a/0.txt", "a/l/0.txt", "b/0.txt", "b/l/0.txt", "c/0.txt"]
    assert sorted(str(file.relative_to(data)) for file in walk(data)) == files
    assert {split: len(paths) for split, paths in files_by_split(data, (".txt",), by_name=False).items()} == {"": 5}


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0.jpg").write_bytes(b"1")
    (tmp_path / "a/secret").mkdir()

    def scan(folder: Any, scandir: Callable[[Any], Any] = os.scandir) -> Any:
        if Path(folder).name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(PackError, match=r"cannot list .*secret: Permission denied"):
        find(tmp_path)
