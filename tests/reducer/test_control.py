"""Control messages of any number of ranks, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.reducer.control import (
    RANKS_PER_NUMBER,
    REQUEST_KINDS,
    ControlMessage,
    ControlResult,
    check_request,
    check_samples,
    decode,
    difference_of,
    encode,
    warning_of,
)

REQUESTS = st.frozensets(st.sampled_from(REQUEST_KINDS))
SAID = st.builds(ControlMessage, st.integers(0, 1 << 20).map(float), requests=REQUESTS)
UNSAID = st.builds(ControlMessage, first_dimension=st.none() | st.integers(0, 1000), requests=REQUESTS)
ABSENT = st.builds(ControlMessage, absent=st.just(value=True), requests=REQUESTS)


def agree(words: list[ControlMessage]) -> ControlResult:
    """What all ranks have, after one sum of floats in the order of ranks."""
    total = [0.0] * len(encode(words[0], 0, len(words)))
    for rank, message in enumerate(words):
        total = [one + other for one, other in zip(total, encode(message, rank, len(words)), strict=True)]
    return decode(total)


def weights(words: list[ControlMessage]) -> list[float]:
    agreed = agree(words)
    return [agreed.weight_of(message) for message in words]


def test_weights_are_shares_of_the_given_samples() -> None:
    assert weights([ControlMessage(8.0), ControlMessage(2.0), ControlMessage(0.0)]) == [0.8, 0.2, 0.0]
    assert weights([ControlMessage(8.0), ControlMessage(absent=True)]) == [1.0, 0.0]


def test_equal_weights_without_given_samples() -> None:
    assert weights(
        [ControlMessage(first_dimension=8), ControlMessage(first_dimension=2), ControlMessage(absent=True)]
    ) == [0.5, 0.5, 0.0]


def test_no_samples_at_all() -> None:
    assert weights([ControlMessage(0.0), ControlMessage(0.0), ControlMessage(absent=True)]) == [0.0, 0.0, 0.0]
    assert weights([ControlMessage(absent=True)] * 2) == [0.0, 0.0]
    assert agree([ControlMessage(absent=True)] * 2).error() is None


def test_samples_given_on_some_ranks_only() -> None:
    error = agree(
        [ControlMessage(3.0), ControlMessage(), ControlMessage(0.0), ControlMessage(absent=True), ControlMessage()]
    ).error()
    assert isinstance(error, UsageError)
    assert str(error).startswith(
        "ranks 1 and 4 have not given the number of samples of the loss, but 2 other ranks have"
    )
    assert "unisono.add_samples(model, n)" in str(error)
    assert str(agree([ControlMessage(3.0), ControlMessage()]).error()).startswith("rank 1 has not given")
    many = agree([ControlMessage(1.0), *[ControlMessage()] * 100]).error()
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more have not given" in str(many)


def test_weights_that_some_ranks_have_changed() -> None:
    twice, once, never = ControlMessage(changes=2), ControlMessage(changes=1), ControlMessage(changes=0)
    for other in (twice, never):
        assert agree([once, other, once, ControlMessage(absent=True), ControlMessage(8.0)]).changes_differ
    for alike in ([once] * 3, [never] * 3, [once, ControlMessage(absent=True)], [ControlMessage()] * 2):
        assert not agree(alike).changes_differ
    error = replace(agree([once, never]), difference="weights differ").error()
    assert isinstance(error, UsageError)
    assert str(error) == "weights differ"


def test_ranks_that_have_compared_their_weights() -> None:
    assert difference_of([1, 0, 1, None], [5, 7, 5, 0]).startswith(
        "since the last backward pass the optimizer has changed the weights on ranks 0 and 2, but not on rank 1, so"
    )
    assert "there were 2 changes in place on rank 1, 4 on rank 2: make" in difference_of([None, 2, 4], [0, 5, 7])
    assert difference_of([3, 0, None], [5, 5, 0]) == ""  # a rank has restored what it had changed


@pytest.mark.parametrize(
    ("words", "before", "warned"),
    [
        ([ControlMessage(first_dimension=8), ControlMessage(first_dimension=8)], False, None),
        (
            [ControlMessage(first_dimension=8), ControlMessage(first_dimension=7)],
            False,
            "first dimensions of the ranks' inputs differ",
        ),
        ([ControlMessage(first_dimension=8), ControlMessage()], False, None),
        ([ControlMessage(first_dimension=8), ControlMessage(absent=True, first_dimension=7)], False, None),
        ([ControlMessage(8.0, first_dimension=8), ControlMessage(7.0, first_dimension=7)], False, None),
        ([ControlMessage(first_dimension=8), ControlMessage(first_dimension=8)], True, "given for an earlier average"),
        ([ControlMessage(first_dimension=8)], True, None),
    ],
)
def test_a_warning_if_batch_sizes_seem_to_differ(words: list[ControlMessage], before: bool, warned: str | None) -> None:
    found = warning_of(agree(words), before)
    assert (found is None) == (warned is None)
    assert warned is None or (warned in str(found) and "unisono.add_samples(model, n)" in str(found))


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=70))
def test_first_dimensions_that_differ_are_seen(firsts: list[int]) -> None:
    assert agree([ControlMessage(first_dimension=first_dimension) for first_dimension in firsts]).uneven == (
        len(set(firsts)) > 1
    )


def test_first_dimensions_too_large_to_compare_give_no_warning() -> None:
    assert not agree([ControlMessage(first_dimension=(1 << 40) + 1)] * 100).uneven


@given(st.lists(SAID | UNSAID | ABSENT, min_size=1, max_size=3 * RANKS_PER_NUMBER))
def test_control_messages_of_any_number_of_ranks(words: list[ControlMessage]) -> None:
    agreed = agree(words)
    samples_given, without_samples = (
        [message for message in words if message.samples_given],
        [message for message in words if not (message.samples_given or message.absent)],
    )
    assert agreed.samples_given == len(samples_given)
    assert agreed.without_samples == tuple(rank for rank, message in enumerate(words) if message in without_samples)
    assert set(agreed.requests) == frozenset().union(*(message.requests for message in words))
    for kind, who in agreed.requests.items():
        ranks = [rank for rank, message in enumerate(words) if kind in message.requests]
        assert who == (f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks")
    assert (agreed.error() is not None) == bool(samples_given and without_samples)
    if not (samples_given and without_samples):
        total = sum(agreed.weight_of(message) for message in words)
        assert total == pytest.approx(1.0 if any(message.contributes for message in words) else 0.0)


@pytest.mark.parametrize("samples", [-1, -0.5, float("nan"), float("inf"), float("-inf")])
def test_invalid_numbers_of_samples(samples: float) -> None:
    with pytest.raises(UsageError, match="0 or more"):
        check_samples(samples)


def test_a_number_of_samples() -> None:
    assert (check_samples(0), check_samples(7), check_samples(0.5)) == (0.0, 7.0, 0.5)


def test_an_unknown_request() -> None:
    assert check_request("save") == "save"
    with pytest.raises(UsageError, match="no request 'halt'; there are save, stop"):
        check_request("halt")
