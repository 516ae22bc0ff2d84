from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unisono.data.kinds import TEXT
from unisono.data.sources.text_windows import files_by_split, windows_source
from unisono.data.text.windows import TokenStream
from unisono.errors import PackError


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names_of(found: dict[str, list[Path]], folder: Path) -> dict[str, list[str]]:
    return {split: [str(file.relative_to(folder)) for file in files] for split, files in found.items()}


def test_folders_are_splits_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    lay(tmp_path, "train/b.txt", "train/a/z.txt", "test/c.txt", "train/.d.txt", ".git/e.txt", "train/f.bin")
    assert names_of(files_by_split(tmp_path, (".txt",), by_name=False), tmp_path) == {
        "test": ["test/c.txt"],
        "train": ["train/a/z.txt", "train/b.txt"],
    }


def test_names_are_splits_where_they_may_be(tmp_path: Path) -> None:
    lay(tmp_path, "train-00000.py", "test.py")
    files = {"train": ["train-00000.py"], "test": ["test.py"]}
    assert names_of(files_by_split(tmp_path, (".py",), by_name=True), tmp_path) == files
    assert list(files_by_split(tmp_path, (".py",), by_name=False)) == [""]


def test_a_file_in_no_split_beside_splits_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, "train/a.txt", "b.txt")
    with pytest.raises(PackError, match=r"b\.txt is in no split, but others are in train"):
        files_by_split(tmp_path, (".txt",), by_name=False)


def test_windows_have_the_bytes_of_the_stream(tmp_path: Path) -> None:
    tokens = np.arange(8, dtype="<u2")
    source = windows_source(TokenStream(tokens, ("a",) * 8, [tmp_path]), 3, tmp_path, "train")
    assert (source.kind, source.shape, len(source)) == (TEXT, (4,), 2)
    assert [np.frombuffer(source.read(number), "<u2").tolist() for number in range(2)] == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert source.sizes.tolist() == [8, 8]
    assert list(source.keys) == ["train/0", "train/1"]


def test_a_text_shorter_than_a_window_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="test has 3 tokens, a window 4: give more text, or a smaller --window"):
        windows_source(TokenStream(np.arange(3), ("a",), []), 3, tmp_path, "test")
