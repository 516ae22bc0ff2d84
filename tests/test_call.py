"""Calls as numbers that ranks compare, and as words that fit in a line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.call import MAX_CALLS, WORDS_BYTES, call_of, decode_words, encode_words


def test_lengths_up_to_a_million_have_numbers_of_their_own() -> None:
    numbers = {call_of(f"allreduce({length} x float32, direct)").digest for length in range(0, 1_000_000, 7)}
    assert len(numbers) == len(range(0, 1_000_000, 7))
    assert max(numbers) < MAX_CALLS
    assert MAX_CALLS >= 1 << 60


@given(
    st.text(max_size=40),
    st.integers(WORDS_BYTES - 3, 3 * WORDS_BYTES),
    st.text(st.characters(codec="ascii"), max_size=40),
)
def test_long_words_that_differ_have_different_encodings(start: str, length: int, end: str) -> None:
    first, second = (encode_words(call_of(f"({start}{'x' * length}{middle}{'y' * length}{end})")) for middle in "ab")
    assert len(first) == len(second) == WORDS_BYTES
    assert first != second


@given(
    st.text(
        st.characters(codec="ascii", exclude_characters=" \n\t\r\x0b\x0c\x00\x1c\x1d\x1e\x1f"), max_size=WORDS_BYTES
    )
)
def test_short_words_round_trip(words: str) -> None:
    assert decode_words(encode_words(call_of(words))) == words
