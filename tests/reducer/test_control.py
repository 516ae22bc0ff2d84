"""Control words of any number of ranks, in one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.reducer.control import (
    BITS,
    KINDS,
    Agreed,
    Word,
    check_request,
    check_samples,
    decode,
    encode,
    warning_of,
)

REQUESTS = st.frozensets(st.sampled_from(KINDS))
SAID = st.builds(Word, st.integers(0, 1 << 20).map(float), requests=REQUESTS)
UNSAID = st.builds(Word, first=st.none() | st.integers(0, 1000), requests=REQUESTS)
ABSENT = st.builds(Word, absent=st.just(value=True), requests=REQUESTS)


def agree(words: list[Word]) -> Agreed:
    """What all ranks have, after one sum of floats in the order of ranks."""
    total = [0.0] * len(encode(words[0], 0, len(words)))
    for rank, word in enumerate(words):
        total = [one + other for one, other in zip(total, encode(word, rank, len(words)), strict=True)]
    return decode(total)


def weights(words: list[Word]) -> list[float]:
    agreed = agree(words)
    return [agreed.weight_of(word) for word in words]


def test_samples_that_are_said_are_the_weights() -> None:
    assert weights([Word(8.0), Word(2.0), Word(0.0)]) == [0.8, 0.2, 0.0]
    assert weights([Word(8.0), Word(absent=True)]) == [1.0, 0.0]


def test_all_weigh_the_same_where_nobody_says() -> None:
    assert weights([Word(first=8), Word(first=2), Word(absent=True)]) == [0.5, 0.5, 0.0]


def test_no_samples_at_all() -> None:
    assert weights([Word(0.0), Word(0.0), Word(absent=True)]) == [0.0, 0.0, 0.0]
    assert weights([Word(absent=True)] * 2) == [0.0, 0.0]
    assert agree([Word(absent=True)] * 2).error() is None


def test_some_say_and_others_do_not() -> None:
    error = agree([Word(3.0), Word(), Word(0.0), Word(absent=True), Word()]).error()
    assert isinstance(error, UsageError)
    assert str(error).startswith(
        "ranks 1 and 4 have not said how many samples the loss is a mean of, 2 other ranks have"
    )
    assert "unisono.add_samples(model, n)" in str(error)
    assert str(agree([Word(3.0), Word()]).error()).startswith("rank 1 has not said")
    many = agree([Word(1.0), *[Word()] * 100]).error()
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more have not said" in str(many)


@pytest.mark.parametrize(
    ("words", "before", "warned"),
    [
        ([Word(first=8), Word(first=8)], False, None),
        ([Word(first=8), Word(first=7)], False, "first dimensions of the ranks' inputs differ"),
        ([Word(first=8), Word()], False, None),
        ([Word(first=8), Word(absent=True, first=7)], False, None),
        ([Word(8.0, first=8), Word(7.0, first=7)], False, None),
        ([Word(first=8), Word(first=8)], True, "said for an earlier average"),
        ([Word(first=8)], True, None),
    ],
)
def test_a_warning_where_ranks_seem_to_differ(words: list[Word], before: bool, warned: str | None) -> None:
    found = warning_of(agree(words), before)
    assert (found is None) == (warned is None)
    assert warned is None or (warned in str(found) and "unisono.add_samples(model, n)" in str(found))


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=70))
def test_first_dimensions_that_differ_are_seen(firsts: list[int]) -> None:
    assert agree([Word(first=first) for first in firsts]).uneven == (len(set(firsts)) > 1)


def test_first_dimensions_that_are_too_large_to_be_compared_warn_nobody() -> None:
    assert not agree([Word(first=(1 << 40) + 1)] * 100).uneven


@given(st.lists(SAID | UNSAID | ABSENT, min_size=1, max_size=3 * BITS))
def test_any_words_of_any_number_of_ranks(words: list[Word]) -> None:
    agreed = agree(words)
    said, unsaid = [word for word in words if word.said], [word for word in words if not (word.said or word.absent)]
    assert agreed.said == len(said)
    assert agreed.unsaid == tuple(rank for rank, word in enumerate(words) if word in unsaid)
    assert set(agreed.requests) == frozenset().union(*(word.requests for word in words))
    for kind, who in agreed.requests.items():
        ranks = [rank for rank, word in enumerate(words) if kind in word.requests]
        assert who == (f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks")
    assert (agreed.error() is not None) == bool(said and unsaid)
    if not (said and unsaid):
        total = sum(agreed.weight_of(word) for word in words)
        assert total == pytest.approx(1.0 if any(word.contributes for word in words) else 0.0)


@pytest.mark.parametrize("samples", [-1, -0.5, float("nan"), float("inf"), float("-inf")])
def test_a_number_of_samples_that_is_none(samples: float) -> None:
    with pytest.raises(UsageError, match="0 or more"):
        check_samples(samples)


def test_a_number_of_samples() -> None:
    assert (check_samples(0), check_samples(7), check_samples(0.5)) == (0.0, 7.0, 0.5)


def test_an_unknown_request() -> None:
    assert check_request("save") == "save"
    with pytest.raises(UsageError, match="no request 'halt'; there are save, stop"):
        check_request("halt")
