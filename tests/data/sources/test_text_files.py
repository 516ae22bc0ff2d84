from __future__ import annotations

from pathlib import Path

import pytest
from tests.data.sources.text_corpus import texts_of

from unisono.data.sources import find
from unisono.errors import PackError


def test_files_are_joined_by_name_each_with_its_end(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "more").mkdir(parents=True)
        (tmp_path / split / "b.txt").write_text(f"{split} bé")
        (tmp_path / split / "more" / "a.py").write_text("a")
    assert texts_of(tmp_path) == {split: f"{split} bé\0a\0".encode() for split in ("test", "train")}


def test_a_single_file_is_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 17 + "yz")
    assert texts_of(tmp_path / "a.txt") == {"train": b"x" * 17 + b"y", "test": b"z\0"}


def test_what_is_no_utf_8_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(PackError, match=r"a\.txt is no text in UTF-8: .*; convert it"):
        find(tmp_path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"x" * 17 + b"yz")
    assert texts_of(tmp_path) == {"train": b"x" * 17 + b"y", "test": b"z\0"}


def test_images_with_a_readme_are_images(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"x")
    (tmp_path / "README.md").write_text("cats")
    assert find(tmp_path)[""].kind == "image"
