from __future__ import annotations

from pathlib import Path

import pytest

from unisono.data.kinds import AUDIO, IMAGE
from unisono.data.sources.folders import find
from unisono.errors import PackError


def lay(folder: Path, *names: str) -> Path:
    """Files whose bytes are their own names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


def test_a_folder_is_a_class(tmp_path: Path) -> None:
    sources = find(lay(tmp_path, "dog/2.jpg", "cat/1.jpg", "cat/3.png", "dog/more/4.webp"))
    assert sources is not None
    assert list(sources) == [""]
    source = sources[""]
    assert source.kind == IMAGE
    assert source.shape is None
    assert source.classes == ("cat", "dog")
    assert list(source.keys) == ["cat/1.jpg", "cat/3.png", "dog/2.jpg", "dog/more/4.webp"]
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.sizes.tolist() == [len(key) for key in source.keys]
    assert [source.read(index) for index in range(4)] == [key.encode() for key in source.keys]


def test_links_to_nothing_and_folders_without_samples_are_told(tmp_path: Path) -> None:
    lay(tmp_path, "dog/2.jpg", "cat/1.jpg", "bird/read.me", ".git/config", "LICENSE")
    (tmp_path / "cat" / "3.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "cat" / "4.jpg").symlink_to("1.jpg")
    sources = find(tmp_path)
    assert sources is not None
    source = sources[""]
    assert list(source.keys) == ["cat/1.jpg", "cat/4.jpg", "dog/2.jpg"]
    assert list(source.skipped) == [("cat/3.jpg", "it is no file, or a link to none")]
    assert source.empty == ["bird"]
    assert source.others == ["bird/read.me"]


def test_classes_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    sources = find(lay(tmp_path, "10/a.jpg", "9/b.jpg", "2/c.jpg"))
    assert sources is not None
    assert sources[""].classes == ("2", "9", "10")
    assert sources[""].labels.tolist() == [2, 0, 1]


def test_folders_named_for_parts_are_parts(tmp_path: Path) -> None:
    sources = find(lay(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "test/cat/3.jpg", "notes/x.txt"))
    assert sources is not None
    assert sorted(sources) == ["test", "train"]
    assert sources["train"].classes == ("cat", "dog")
    assert list(sources["test"].keys) == ["cat/3.jpg"]


def test_names_of_splits_may_have_capitals(tmp_path: Path) -> None:
    sources = find(lay(tmp_path, "Train/cat/1.jpg", "Train/dog/2.jpg", "TEST/cat/3.jpg"))
    assert sources is not None
    assert {name: source.classes for name, source in sources.items()} == {"train": ("cat", "dog"), "test": ("cat",)}
    with pytest.raises(PackError, match=", beside TEST"):
        find(lay(tmp_path, "test/cat/3.jpg"))


def test_a_part_without_samples_is_none(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    sources = find(lay(tmp_path, "train/cat/1.jpg", "test/read.me"))
    assert sources is not None
    assert list(sources) == ["train"]


def test_audio_files_side_by_side_begin_with_their_class(tmp_path: Path) -> None:
    sources = find(lay(tmp_path, "7_paul_4.wav", "3_anna_0.wav", "10_anna_1.wav"))
    assert sources is not None
    source = sources[""]
    assert source.kind == AUDIO
    assert source.classes == ("3", "7", "10")
    assert dict(zip(source.keys, source.labels.tolist(), strict=True)) == {
        "7_paul_4.wav": 1,
        "3_anna_0.wav": 0,
        "10_anna_1.wav": 2,
    }


def test_images_side_by_side_have_no_class(tmp_path: Path) -> None:
    assert find(lay(tmp_path, "1.jpg", "2.jpg")) is None


@pytest.mark.parametrize("stray", ["overview.png", "._overview.jpg", "cat/._1.jpg", ".thumbs/1.jpg"])
def test_a_stray_image_beside_the_classes_is_none_of_them(tmp_path: Path, stray: str) -> None:
    sources = find(lay(tmp_path, "cat/1.jpg", "dog/2.jpg", stray))
    assert sources is not None
    assert sources[""].classes == ("cat", "dog")
    assert list(sources[""].keys) == ["cat/1.jpg", "dog/2.jpg"]


def test_images_and_audio_files_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="pack them one by one"):
        find(lay(tmp_path, "cat/1.jpg", "dog/2.wav"))


def test_a_class_beside_parts_is_refused_with_both_names(tmp_path: Path) -> None:
    """It may be a class that is called as parts are, like train."""
    with pytest.raises(PackError, match="has train, which is a split of a data set, beside bus, which is not"):
        find(lay(tmp_path, "train/1.jpg", "bus/2.jpg"))


def test_links_are_followed_unless_they_lead_in_a_circle(tmp_path: Path) -> None:
    lay(tmp_path, "elsewhere/1.jpg", "elsewhere/more/2.jpg", "data/dog/3.jpg")
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "dog" / "4.jpg").symlink_to(tmp_path / "elsewhere" / "1.jpg")
    (tmp_path / "data" / "dog" / "all").symlink_to(tmp_path / "data")
    sources = find(tmp_path / "data")
    assert sources is not None
    assert list(sources[""].keys) == ["cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg", "dog/4.jpg"]


def test_a_link_to_nothing_is_left_out(tmp_path: Path) -> None:
    lay(tmp_path, "cat/1.jpg")
    (tmp_path / "cat" / "2.jpg").symlink_to(tmp_path / "nowhere.jpg")
    sources = find(tmp_path)
    assert sources is not None
    assert list(sources[""].keys) == ["cat/1.jpg"]


def test_folders_of_nothing_known_are_none(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(lay(tmp_path, "cat/1.txt", "dog.csv")) is None
    assert find(tmp_path / "dog.csv") is None


def test_a_file_that_is_gone_is_reported_when_it_is_read(tmp_path: Path) -> None:
    sources = find(lay(tmp_path, "cat/1.jpg", "dog/2.jpg"))
    assert sources is not None
    (tmp_path / "dog" / "2.jpg").unlink()
    with pytest.raises(FileNotFoundError):
        sources[""].read(1)
