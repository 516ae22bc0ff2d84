from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from unisono.data.kinds import AUDIO, IMAGE
from unisono.data.sources.shards import find
from unisono.errors import PackError


def lay(path: Path, **members: bytes) -> Path:
    """A tar file; the names are given as keys."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def test_labels_lie_beside_the_images(tmp_path: Path) -> None:
    members = {"0001.jpg": b"one", "0001.cls": b"10\n", "0002.cls": b"9", "0002.jpg": b"twotwo", "read.me": b"words"}
    sources = find(lay(tmp_path / "shard.tar", **members))
    assert sources is not None
    assert list(sources) == [""]
    source = sources[""]
    assert source.kind == IMAGE
    assert source.classes == ("9", "10")
    assert source.labels.tolist() == [1, 0]
    assert list(source.keys) == ["shard.tar/0001.jpg", "shard.tar/0002.jpg"]
    assert source.sizes.tolist() == [3, 6]
    assert [source.read(index) for index in range(2)] == [b"one", b"twotwo"]


def test_a_label_can_be_a_name(tmp_path: Path) -> None:
    sources = find(lay(tmp_path / "a.tar", **{"1.wav": b"x", "1.cls": b"no\n", "2.wav": b"y", "2.cls": b"go"}))
    assert sources is not None
    assert sources[""].kind == AUDIO
    assert sources[""].classes == ("go", "no")


@pytest.mark.parametrize("key", ["label", "cls", "class"])
def test_a_label_can_be_in_json(tmp_path: Path, key: str) -> None:
    text = f'{{"width": 3, "{key}": 7}}'.encode()
    sources = find(lay(tmp_path / "a.tar", **{"1.jpg": b"x", "1.json": text, "0.jpg": b"y", "0.cls": b"12"}))
    assert sources is not None
    assert sources[""].classes == ("7", "12")
    assert sources[""].labels.tolist() == [0, 1]


def test_a_name_ends_at_its_first_dot(tmp_path: Path) -> None:
    sources = find(lay(tmp_path / "a.tar", **{"b.c/1.left.jpg": b"x", "b.c/1.cls": b"7"}))
    assert sources is not None
    assert sources[""].classes == ("7",)


def test_an_image_that_belongs_to_another_is_told(tmp_path: Path) -> None:
    for image in ("1.jpg", "1.JPG"):
        sources = find(lay(tmp_path / "a.tar", **{image: b"x", "1.seg.png": b"y", "1.cls": b"7"}))
        assert sources is not None
        assert list(sources[""].keys) == [f"a.tar/{image}"]
        assert list(sources[""].skipped) == [("a.tar/1.seg.png", f"it belongs to {image}")]


def test_a_label_can_be_the_folder(tmp_path: Path) -> None:
    sources = find(
        lay(tmp_path / "a.tar", **{"data/dog/1.jpg": b"x", "data/cat/1.jpg": b"y", "data/cat/1.json": b"{}"})
    )
    assert sources is not None
    assert sources[""].classes == ("cat", "dog")
    assert sources[""].labels.tolist() == [1, 0]


@pytest.mark.parametrize("start", ["./", "./data/"])
def test_names_may_begin_at_the_folder_that_was_packed(tmp_path: Path, start: str) -> None:
    """As `tar -cf a.tar .` writes them."""
    sources = find(lay(tmp_path / "a.tar", **{f"{start}1.jpg": b"x", f"{start}1.cls": b"7"}))
    assert sources is not None
    assert sources[""].classes == ("7",)


def test_of_members_with_one_name_the_last_is_packed_with_its_label_and_the_others_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for image, label in ((b"first", b"3"), (b"second!", b"7")):
            for name, content in (("1.jpg", image), ("1.cls", label)):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    sources = find(path)
    assert sources is not None
    source = sources[""]
    assert (source.classes, list(source.keys), source.read(0)) == (("7",), ["a.tar/1.jpg"], b"second!")
    assert list(source.skipped) == [("a.tar/1.jpg", "a later member has the same name")]


def test_links_and_folders_without_samples_are_told(tmp_path: Path) -> None:
    path = lay(tmp_path / "a.tar", **{"train/cat/1.jpg": b"x", "test/cat/2.jpg": b"y"})
    with tarfile.open(path, "a") as tar:
        for name, kind, target in (
            ("train/cat/3.jpg", tarfile.SYMTYPE, "1.jpg"),
            ("test/cat/4.jpg", tarfile.LNKTYPE, "test/cat/2.jpg"),
            ("val/cat/5.jpg", tarfile.FIFOTYPE, ""),
            ("train/bird", tarfile.DIRTYPE, ""),
            ("train/cat", tarfile.DIRTYPE, ""),
            ("val", tarfile.DIRTYPE, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            tar.addfile(entry)
    sources = find(path)
    assert sources is not None
    assert {name: len(source) for name, source in sources.items()} == {"train": 1, "test": 1}
    assert list(sources["test"].skipped) == [("a.tar/test/cat/4.jpg", "it is a link, to test/cat/2.jpg")]
    assert list(sources["train"].skipped) == [
        ("a.tar/train/cat/3.jpg", "it is a link, to 1.jpg"),
        ("a.tar/val/cat/5.jpg", "it is no plain file"),
    ]
    assert sources["train"].empty == ["bird"]


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    """As macOS puts them beside each file."""
    sources = find(lay(tmp_path / "a.tar", **{"cat/._1.jpg": b"notes", "cat/1.jpg": b"x"}))
    assert sources is not None
    assert list(sources[""].keys) == ["a.tar/cat/1.jpg"]


def test_folders_named_for_parts_are_parts(tmp_path: Path) -> None:
    members = {"d/train/cat/1.jpg": b"x", "d/test/cat/2.jpg": b"y", "d/train/dog/3.jpg": b"z"}
    sources = find(lay(tmp_path / "a.tar", **members))
    assert sources is not None
    assert {name: list(source.keys) for name, source in sources.items()} == {
        "train": ["a.tar/d/train/cat/1.jpg", "a.tar/d/train/dog/3.jpg"],
        "test": ["a.tar/d/test/cat/2.jpg"],
    }


def test_names_of_splits_may_have_capitals(tmp_path: Path) -> None:
    sources = find(lay(tmp_path / "a.tar", **{"d/Train/cat/1.jpg": b"x", "d/TEST/dog/2.jpg": b"y"}))
    assert sources is not None
    assert {name: source.classes for name, source in sources.items()} == {"train": ("cat",), "test": ("dog",)}
    (tmp_path / "Val").mkdir()
    (tmp_path / "a.tar").rename(tmp_path / "Val" / "0.tar")
    assert find(tmp_path) is not None


def test_within_a_part_the_outer_folder_is_the_class(tmp_path: Path) -> None:
    sources = find(lay(tmp_path / "a.tar", **{"train/cat/young/1.jpg": b"x", "train/dog/2.jpg": b"y"}))
    assert sources is not None
    assert sources["train"].classes == ("cat", "dog")


def test_a_part_can_be_a_word_of_the_name(tmp_path: Path) -> None:
    for name in ("flowers-train-000", "flowers-train-001", "flowers_val.0"):
        lay(tmp_path / f"{name}.tar", **{"1.jpg": b"x", "1.cls": b"7"})
    sources = find(tmp_path)
    assert sources is not None
    assert {name: len(source) for name, source in sources.items()} == {"train": 2, "val": 1}


def test_a_part_can_be_the_folder_of_the_tar_files(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        lay(tmp_path / part / "0.tar", **{"1.jpg": b"x", "1.cls": b"7"})
    sources = find(tmp_path)
    assert sources is not None
    assert sorted(sources) == ["test", "train"]


def test_one_tar_file_is_no_part_whatever_its_name(tmp_path: Path) -> None:
    sources = find(lay(tmp_path / "flowers-train.tar", **{"1.jpg": b"x", "1.cls": b"7"}))
    assert sources is not None
    assert list(sources) == [""]


def test_a_sample_in_no_part_is_refused_where_others_are_in_some(tmp_path: Path) -> None:
    members = {"train/cat/1.jpg": b"x", "stray/2.jpg": b"y", "test/cat/3.jpg": b"z"}
    with pytest.raises(PackError, match=r"stray/2\.jpg in a\.tar is in no split, but others are in test, train"):
        find(lay(tmp_path / "a.tar", **members))


def test_all_shards_of_a_folder_are_one_data_set(tmp_path: Path) -> None:
    for shard in (1, 0, 2):
        lay(tmp_path / f"shard-{shard}.tar", **{"1.jpg": b"x" * shard, "1.cls": str(shard).encode()})
    sources = find(tmp_path)
    assert sources is not None
    source = sources[""]
    assert list(source.keys) == [f"shard-{shard}.tar/1.jpg" for shard in range(3)]
    assert source.labels.tolist() == [0, 1, 2]
    assert [source.read(index) for index in range(3)] == [b"", b"x", b"xx"]


def test_other_files_and_folders_are_none(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(b"x")
    assert find(tmp_path) is None
    assert find(tmp_path / "cat.jpg") is None


def test_a_sample_without_a_label_is_refused_with_the_names_that_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"a\.tar: 12\.jpg has no label: neither 12\.cls, nor 12\.json, nor a folder"):
        find(lay(tmp_path / "a.tar", **{"12.jpg": b"x", "13.cls": b"1"}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("1.cls", b"\xff\xfe"),
        ("1.cls", b" \n"),
        ("1.json", b"\xff\xfe"),
        ("1.json", b"{"),
        ("1.json", b"[7]"),
        ("1.json", b"[" * 100_000),
        ("1.json", b"7"),
        ("1.json", b""),
        ("1.json", b'{"label": null}'),
    ],
)
def test_a_label_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(PackError, match=rf"a\.tar: .*no label.*{name}|a\.tar: {name} holds no label"):
        find(lay(tmp_path / "a.tar", **{"1.jpg": b"x", name: content}))


def test_a_tar_file_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"a\.tar has no image or audio file"):
        find(lay(tmp_path / "a.tar", **{"1.txt": b"x"}))


def test_images_and_audio_files_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="pack them one by one"):
        find(lay(tmp_path / "a.tar", **{"cat/1.jpg": b"x", "cat/1.wav": b"x"}))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar"])
def test_a_compressed_tar_file_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(lay(tmp_path / "b", **{"cat/1.jpg": b"x"}).read_bytes()))
    with pytest.raises(PackError, match="if it is compressed, unpack it first"):
        find(path)


@pytest.mark.parametrize("left", [0, 100, 700, 1500])
def test_a_tar_file_that_is_not_all_there_is_refused(tmp_path: Path, left: int) -> None:
    path = lay(tmp_path / "a.tar", **{"cat/1.jpg": b"x" * 3000})
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(PackError, match=r"cannot read .*a\.tar"):
        find(path)


@pytest.mark.parametrize("damage", ["header", "cut", "no end", "two in one"])
def test_members_that_cannot_be_found_are_told(tmp_path: Path, damage: str) -> None:
    content = bytearray(lay(tmp_path / "a.tar", **{"cat/1.jpg": b"x", "cat/2.jpg": b"y"}).read_bytes())
    content[1024 + 150] ^= damage == "header"
    path, ends = tmp_path / "b.tar", {"cut": 1024 + 100, "no end": 2048}
    path.write_bytes(content[: ends.get(damage)] + content * (damage == "two in one"))
    with pytest.raises(
        PackError, match=rf"b\.tar has .* at byte {2048 if damage in ('no end', 'two in one') else 1024}"
    ):
        find(path)
