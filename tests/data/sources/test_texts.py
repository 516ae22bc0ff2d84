from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tests.data.sources.text_corpus import stream_of, texts_of

from unisono.data.kinds import TEXT
from unisono.data.kinds.text import BYTES, TextOptions, make_tokenizer, token_dtype
from unisono.data.sources import find
from unisono.data.sources.texts import TokenStream, files_by_split, join_texts, windows_source
from unisono.errors import PackError


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names_of(splits: dict[str, list[Path]], folder: Path) -> dict[str, list[str]]:
    return {split: [str(file.relative_to(folder)) for file in files] for split, files in splits.items()}


def test_folders_are_splits_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    lay(tmp_path, "train/b.txt", "train/a/z.txt", "test/c.txt", "train/.d.txt", ".git/e.txt", "train/f.bin")
    assert names_of(files_by_split(tmp_path, (".txt",), by_name=False), tmp_path) == {
        "test": ["test/c.txt"],
        "train": ["train/a/z.txt", "train/b.txt"],
    }


def test_texts_of_another_format_that_are_left_out_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "part1.jsonl").write_text(json.dumps({"text": "a text" * 4}))
    (tmp_path / "PART2.JSONL").write_text(json.dumps({"text": "another one"}))
    lay(tmp_path, "part3.txt", "picture.png")
    splits = find(tmp_path, TextOptions(window=2))
    assert [[*part.others] for part in splits.values()] == [["part3.txt"], []]
    assert sum(len(part.labels) for part in splits.values()) == 17, "the tokens of both files"


def test_a_link_to_no_text_is_named(tmp_path: Path) -> None:
    lay(tmp_path, "train/a.txt")
    (tmp_path / "train" / "b.txt").symlink_to("nowhere.txt")
    with pytest.raises(PackError, match=r"train/b\.txt is no file, or a link to none: restore it, or remove it"):
        files_by_split(tmp_path, (".txt",), by_name=False)
    (tmp_path / "train" / "a.txt").unlink()  # a text beside data of another kind
    assert files_by_split(tmp_path, (".txt",), by_name=False) == {}


def test_names_are_splits_where_they_may_be(tmp_path: Path) -> None:
    lay(tmp_path, "train-00000.py", "test.py")
    files = {"train": ["train-00000.py"], "test": ["test.py"]}
    assert names_of(files_by_split(tmp_path, (".py",), by_name=True), tmp_path) == files
    assert list(files_by_split(tmp_path, (".py",), by_name=False)) == [""]


@pytest.mark.parametrize(
    ("names", "by_name", "splits"),
    [
        (("test.txt", "train.txt", "valid.txt"), False, ["test", "train", "valid"]),
        (("ptb.test.txt", "ptb.train.txt"), False, ["test", "train"]),
        (("test.txt", "trains.txt"), False, [""]),
        (("train.txt",), False, [""]),
        (("en/c4-train.00000.txt", "en/c4-validation.00000.txt"), True, ["train", "validation"]),
    ],
)
def test_words_of_names_are_splits(tmp_path: Path, names: tuple[str, ...], by_name: bool, splits: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("words")
    assert sorted(files_by_split(tmp_path, (".txt",), by_name)) == splits


def test_names_of_splits_may_have_capitals(tmp_path: Path) -> None:
    lay(tmp_path, "Train/a.txt", "Train/b.txt", "Test/c.txt")
    assert list(names_of(files_by_split(tmp_path, (".txt",), by_name=False), tmp_path)) == ["test", "train"]


def test_a_file_in_no_split_beside_splits_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, "train/a.txt", "b.txt")
    with pytest.raises(PackError, match=r"b\.txt is in no split, but others are in train"):
        files_by_split(tmp_path, (".txt",), by_name=False)


def test_windows_have_the_bytes_of_the_stream(tmp_path: Path) -> None:
    tokens = np.arange(8, dtype="<u2")
    source = windows_source(TokenStream(tokens, ("a",) * 8, [tmp_path]), 3, tmp_path, "train")
    assert (source.kind, source.shape, len(source)) == (TEXT, (4,), 2)
    assert [np.frombuffer(source.read(index), "<u2").tolist() for index in range(2)] == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert source.sizes.tolist() == [8, 8]
    assert list(source.keys) == ["train/0", "train/1"]


def windows(tokens: np.ndarray, window: int) -> list[list[int]]:
    source = windows_source(TokenStream(tokens, (), []), window, Path("texts"), "train")
    return [np.frombuffer(source.read(index), tokens.dtype).tolist() for index in range(len(source))]


def test_the_example() -> None:
    stream = join_texts(["ab", "c", "", "de"], make_tokenizer(BYTES))
    assert bytes(stream.astype(np.uint8)) == b"ab\0c\0de\0"
    assert windows(stream, 2) == [[97, 98, 0], [0, 99, 0], [0, 100, 101]]


@given(tokens=st.lists(st.integers(0, 99), min_size=10, max_size=40), window=st.integers(1, 9))
def test_each_token_but_the_first_is_a_label_once(tokens: list[int], window: int) -> None:
    rows = windows(np.array(tokens, token_dtype(100)), window)
    assert all(len(row) == window + 1 for row in rows)
    labels = [token for row in rows for token in row[1:]]
    inputs = [token for row in rows for token in row[:-1]]
    assert labels == tokens[1 : len(labels) + 1]
    assert inputs == tokens[: len(labels)]
    assert len(tokens) - len(labels) <= window


def test_no_text_is_no_token() -> None:
    assert join_texts([], make_tokenizer(BYTES)).tolist() == []


def test_a_text_shorter_than_a_window_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="test has 3 tokens, a window 4: give more text, or a smaller --window"):
        windows_source(TokenStream(np.arange(3), ("a",), []), 3, tmp_path, "test")


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


def test_lines_are_texts_and_names_are_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        lines = [json.dumps({"text": f"{split} 1\n"}), "", json.dumps({"content": "é", "text": "2"})]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    assert texts_of(tmp_path) == {split: f"{split} 1\n\0002\0".encode() for split in ("test", "train")}


def test_content_is_taken_where_there_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "abcdefghijklmnopqrs"}\n')
    assert b"".join(texts_of(tmp_path).values()) == b"abcdefghijklmnopqrs\0"


@pytest.mark.parametrize("line", ['{"words": "a"}', '{"text": 1}', '["a"]'])
def test_a_line_without_a_text_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(PackError, match=r"a\.jsonl: line 2 has no text in text or content"):
        texts_of(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "Expecting ',' delimiter at character 13; mend the line"),
        (b"[" * 100_000, "maximum recursion depth exceeded"),
        ('{"text": "für"}'.encode("latin-1"), "'utf-8' codec can't decode byte 0xfc"),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r\n\n' + line)
    with pytest.raises(PackError, match=rf"a\.jsonl: line 3 is no JSON in UTF-8: {message}"):
        texts_of(tmp_path)


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abcdefghijklmnopqrs"}\r\n\r\n')
    assert b"".join(texts_of(tmp_path).values()) == b"abcdefghijklmnopqrs\0"


def test_rows_are_texts_in_a_file_and_in_a_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        table = pa.table({"id": [1, 2, 3], "text": [f"{split}, a longer text: é", None, "b"]})
        parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    assert texts_of(tmp_path) == {split: f"{split}, a longer text: é\0b\0".encode() for split in ("test", "train")}
    parts = texts_of(tmp_path / "train-00000-of-00001.parquet")
    assert list(parts) == ["train", "test"]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_strings_of_any_layout_are_texts(tmp_path: Path, kind: pa.DataType) -> None:
    """Polars writes large ones, pandas categories."""
    parquet.write_table(pa.table({"text": pa.array(["abcdefghijklmnopqrs"]).cast(kind)}), tmp_path / "a.parquet")
    assert b"".join(texts_of(tmp_path).values()) == b"abcdefghijklmnopqrs\0"


def test_a_table_without_texts_is_refused_with_its_columns(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": [1], "id": [2]}), tmp_path / "a.parquet")
    with pytest.raises(PackError, match="has the columns text, id; it needs one of strings named 'text'"):
        texts_of(tmp_path)


def test_what_is_no_parquet_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(PackError, match=r"cannot read .*a\.parquet"):
        texts_of(tmp_path)


def test_tokens_are_taken_as_they_are_with_one_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.array([5, 0, 70_000, 3], np.int64))
    np.save(tmp_path / "test.npy", np.array([1, 2], np.uint8))
    sources = find(tmp_path, TextOptions(1))
    assert {name: stream_of(source) for name, source in sources.items()} == {"train": [5, 0, 70_000, 3], "test": [1, 2]}
    assert {len(source.classes) for source in sources.values()} == {70_001}
    assert sources["test"].classes[:2] == ("0", "1")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([0.5]), r"float64 numbers of shape \(1,\); tokens are integers"),
        (np.zeros((2, 2), int), r"int64 numbers of shape \(2, 2\)"),
        (np.array([-1, 4]), "numbers from -1 to 4; tokens are from 0 to 1,048,575"),
        (np.array([1 << 20]), "numbers from 1048576 to 1048576"),
    ],
)
def test_what_are_no_tokens_is_refused(tmp_path: Path, tokens: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises(PackError, match=message):
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
