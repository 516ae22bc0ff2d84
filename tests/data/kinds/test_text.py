"""Windows are packed as they are, and their labels are tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.kinds.text import (
    BYTES,
    ByteTokenizer,
    FileTokenizer,
    TextKind,
    TextTransform,
    make_tokenizer,
    token_dtype,
)
from unisono.data.pack.packing import PackOptions
from unisono.errors import DecodeError, PackError, UsageError


def test_windows_stay_as_they_are() -> None:
    assert TextKind().encode(b"\0\1\2\3", PackOptions()) == b"\0\1\2\3"


def test_labels_are_those_of_the_window_not_of_the_index() -> None:
    memory = torch.arange(12).reshape(2, 2, 3)
    assert TextKind().labels(memory, torch.zeros(2)).tolist() == [[3, 4, 5], [9, 10, 11]]
    assert TextKind().labels_per_sample((4,)) == 3


def test_only_bytes_stand_for_one_byte_each() -> None:
    assert TextKind().bytes_per_label(ByteTokenizer.tokens) == 1
    assert TextKind().bytes_per_label(("the", "a")) is None
    assert TextKind.labels_are_tokens


@given(text=st.text())
def test_bytes_are_those_of_utf_8(text: str) -> None:
    tokens = make_tokenizer(BYTES).encode(text)
    assert bytes(tokens.astype(np.uint8)) == text.encode()
    assert make_tokenizer(BYTES).decode(tokens.tolist()) == text


def test_bytes_have_256_names_and_half_a_surrogate_pair_is_a_question_mark() -> None:
    tokenizer = make_tokenizer(BYTES)
    assert len(set(tokenizer.tokens)) == 256
    assert [tokenizer.tokens[byte] for byte in (0, 10, 97, 195)] == ["\\x00", "\\n", "a", "\\xc3"]
    assert tokenizer.encode("\ud800").tolist() == [ord("?")]
    assert tokenizer.decode([102, 195, 188, 195]) == "fü\N{REPLACEMENT CHARACTER}"


def written(path: Path, names: list[str]) -> Path:
    """A tokenizer of whole words."""
    model = {
        "type": "WordLevel",
        "vocab": {name: 2 * index for index, name in enumerate(names)},
        "unk_token": names[0],
    }
    path.write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}))
    return path


def test_a_file_gives_its_own_tokens(tmp_path: Path) -> None:
    """Numbers that it leaves out have a name, too."""
    pytest.importorskip("tokenizers")
    tokenizer = make_tokenizer(str(written(tmp_path / "t.json", ["?", "one", "</s>", "two"])))
    assert tokenizer.tokens == ("?", "unused 1", "one", "unused 3", "</s>", "unused 5", "two")
    assert tokenizer.end_of_text == 4
    assert tokenizer.files == (tmp_path / "t.json",)
    assert tokenizer.encode("two one three").tolist() == [6, 2, 0]
    assert tokenizer.decode([6, 2, 4]) == "two one </s>"


def test_texts_are_neither_cut_nor_filled_up_though_the_file_says_so(tmp_path: Path) -> None:
    """Files of models have the truncation and padding of the model's inputs."""
    tokenizers = pytest.importorskip("tokenizers")
    file = str(written(tmp_path / "t.json", ["?", "one", "</s>"]))
    library = tokenizers.Tokenizer.from_file(file)
    library.enable_truncation(3)
    library.enable_padding(length=8)
    library.save(file)
    tokenizer = make_tokenizer(file)
    assert tokenizer.encode("one one one one").tolist() == [2] * 4
    assert tokenizer.encode("one").tolist() == [2]
    assert tokenizer.encode("one \ud800").tolist() == [2, 0], "half of a surrogate pair is no text"


def test_a_file_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(PackError, match=r"t\.json has no token that ends a text, none of <\|endoftext\|>"):
        FileTokenizer(written(tmp_path / "t.json", ["?", "one"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "Expecting property"),
        ("{}", "it has no model"),
        ("1", "iterable"),
        ('{"model": 1}', "is no tokenizer.json of this library: data did not match"),
        ('{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}}', "no token that ends a text"),
    ],
)
def test_what_is_no_tokenizer_is_refused_with_its_name(tmp_path: Path, content: str | None, message: str) -> None:
    pytest.importorskip("tokenizers")
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(PackError, match=rf"--tokenizer .*t\.json.*{message}"):
        FileTokenizer(tmp_path / "t.json")


def test_a_file_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.data.kinds.text.find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"needs tokenizers: pip install '\.\[text\]' in the clone of Unisono; or use bytes"
    ):
        FileTokenizer(tmp_path / "t.json")


@pytest.mark.parametrize(("vocabulary", "dtype"), [(256, "<u2"), (70_000, "<u4")])
def test_labels_are_the_inputs_one_token_on(vocabulary: int, dtype: str) -> None:
    window = np.array([vocabulary - 1, 0, 7, 3]).astype(dtype)
    transform, out = TextTransform(3, vocabulary), torch.zeros(2, 3, dtype=torch.int64)
    transform.into(out, memoryview(window.tobytes()), None)
    assert out.tolist() == [[vocabulary - 1, 0, 7], [0, 7, 3]]
    assert transform.batch(out[None]).tolist() == [[vocabulary - 1, 0, 7]]


def test_a_window_of_another_length_is_refused_with_both_lengths() -> None:
    with pytest.raises(DecodeError, match="a window of 4 tokens has 8 bytes, this one 6"):
        TextTransform(3, 256).into(torch.zeros(2, 3), memoryview(bytes(6)), None)


@pytest.mark.parametrize(("vocabulary", "nbytes"), [(256, 2), (65_536, 2), (65_537, 4)])
def test_tokens_take_as_many_bytes_as_the_vocabulary_needs(vocabulary: int, nbytes: int) -> None:
    assert token_dtype(vocabulary).itemsize == nbytes
    assert np.array([vocabulary - 1], token_dtype(vocabulary))[0] == vocabulary - 1
