import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.shuffle_options import ShuffleOptions, parse_shuffle
from unisono.errors import RecipeError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch", ShuffleOptions()),
        ("every:3", ShuffleOptions(3)),
        ("once", ShuffleOptions(0)),
        ("every:4,parts:2", ShuffleOptions(4, 2)),
        ("once,parts:8", ShuffleOptions(0, 8)),
    ],
)
def test_words_and_values(text: str, expected: ShuffleOptions) -> None:
    assert parse_shuffle(text) == expected
    assert str(expected) == text


def test_every_epoch_has_one_value() -> None:
    assert parse_shuffle("every:1") == parse_shuffle("epoch")


@pytest.mark.parametrize(
    "text",
    [
        *("", "never", "every", "every:0", "every:-2", "every:1.5", "every:2 ", "every:\N{SUPERSCRIPT TWO}"),
        *("parts:2", "epoch,parts:2", "every:1,parts:2", "once,parts:0", "every:2,", "every:2,parts:"),
        "every:9999999999",
    ],
)
def test_other_words_are_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(RecipeError, match=r'it is "epoch", "every:N" or "once"'):
        parse_shuffle(text)


@given(st.integers(0, 6), st.integers(0, 40))
def test_the_last_shuffle_between_all_ranks(every: int, epoch: int) -> None:
    shuffles = [0] if not every else list(range(0, epoch + 1, every))
    assert ShuffleOptions(every).first_epoch(epoch) == shuffles[-1]
