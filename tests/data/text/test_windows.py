from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.text.options import BYTES
from unisono.data.text.tokenizers import make_tokenizer
from unisono.data.text.windows import TokenStream, join_texts, token_dtype, window_at, window_count, with_test_split


def windows(stream: np.ndarray, window: int) -> list[list[int]]:
    count = window_count(len(stream), window)
    return [np.frombuffer(window_at(stream, window, number), stream.dtype).tolist() for number in range(count)]


def test_the_example() -> None:
    stream = join_texts(["ab", "c", "", "de"], make_tokenizer(BYTES))
    assert bytes(stream.astype(np.uint8)) == b"ab\0c\0de\0"
    assert windows(stream, 2) == [[97, 98, 0], [0, 99, 0], [0, 100, 101]]


@given(tokens=st.lists(st.integers(0, 99), max_size=40), window=st.integers(1, 9))
def test_each_token_but_the_first_is_a_label_once(tokens: list[int], window: int) -> None:
    found = windows(np.array(tokens, token_dtype(100)), window)
    assert all(len(one) == window + 1 for one in found)
    labels = [token for one in found for token in one[1:]]
    inputs = [token for one in found for token in one[:-1]]
    assert labels == tokens[1 : len(labels) + 1]
    assert inputs == tokens[: len(labels)]
    assert len(tokens) - len(labels) <= window


@pytest.mark.parametrize(("vocabulary", "nbytes"), [(256, 2), (65_536, 2), (65_537, 4)])
def test_tokens_take_as_many_bytes_as_the_vocabulary_needs(vocabulary: int, nbytes: int) -> None:
    assert token_dtype(vocabulary).itemsize == nbytes
    assert np.array([vocabulary - 1], token_dtype(vocabulary))[0] == vocabulary - 1


def test_the_last_tenth_is_the_test_set_where_there_are_no_splits() -> None:
    stream = TokenStream(np.arange(25), ("a",), [Path("a.txt")])
    found = with_test_split({"": stream})
    assert found["train"].tokens.tolist() == list(range(23))
    assert found["test"].tokens.tolist() == [23, 24]
    assert with_test_split({"train": stream}) == {"train": stream}


def test_no_text_is_no_token() -> None:
    assert join_texts([], make_tokenizer(BYTES)).tolist() == []
