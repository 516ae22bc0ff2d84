from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.data.sources.text_corpus import stream_of

from unisono.data.sources import find
from unisono.data.text.options import TextOptions
from unisono.errors import PackError


def test_tokens_are_taken_as_they_are_with_one_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.array([5, 0, 70_000, 3], np.int64))
    np.save(tmp_path / "test.npy", np.array([1, 2], np.uint8))
    found = find(tmp_path, TextOptions(1))
    assert {name: stream_of(source) for name, source in found.items()} == {"train": [5, 0, 70_000, 3], "test": [1, 2]}
    assert {len(source.classes) for source in found.values()} == {70_001}
    assert found["test"].classes[:2] == ("0", "1")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (np.array([0.5]), r"float64 numbers of shape \(1,\); tokens are integers"),
        (np.zeros((2, 2), int), r"int64 numbers of shape \(2, 2\)"),
        (np.array([-1, 4]), "numbers from -1 to 4; tokens are from 0 to 1,048,575"),
        (np.array([1 << 20]), "numbers from 1048576 to 1048576"),
    ],
)
def test_what_are_no_tokens_is_refused(tmp_path: Path, tokens: np.ndarray, words: str) -> None:
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises(PackError, match=words):
        find(tmp_path)


def test_files_that_hold_no_single_array_are_refused_with_their_name(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"")
    with pytest.raises(PackError, match=r"cannot read .*a\.npy: No data left in file"):
        find(tmp_path)
    with (tmp_path / "a.npy").open("wb") as file:
        np.savez(file, one=np.arange(3), two=np.arange(3))
    with pytest.raises(PackError, match=r"a\.npy holds several arrays: save one with numpy\.save"):
        find(tmp_path)


def test_a_tokenizer_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(9))
    with pytest.raises(PackError, match=r"is tokenised already; leave --tokenizer t\.json away"):
        find(tmp_path, TextOptions(1, "t.json"))
