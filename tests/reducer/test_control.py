"""Control messages: their sum over all ranks, and those of one rank, step after step."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.reducer.control import (
    RANKS_PER_NUMBER,
    REQUEST_KINDS,
    ControlMessage,
    ControlResult,
    StepControl,
    decode,
    difference_of,
    encode,
)

REQUESTS = st.frozensets(st.sampled_from(REQUEST_KINDS))
SAID = st.builds(ControlMessage, st.integers(0, 1 << 20).map(float), requests=REQUESTS)
UNSAID = st.builds(ControlMessage, first_dimension=st.none() | st.integers(0, 1000), requests=REQUESTS)
ABSENT = st.builds(ControlMessage, absent=st.just(value=True), requests=REQUESTS)


def agree(messages: list[ControlMessage]) -> ControlResult:
    """What all ranks have, after one sum of floats in the order of ranks."""
    total = [0.0] * len(encode(messages[0], 0, len(messages)))
    for rank, message in enumerate(messages):
        total = [partial + value for partial, value in zip(total, encode(message, rank, len(messages)), strict=True)]
    return decode(total)


def weights(messages: list[ControlMessage]) -> list[float]:
    agreed = agree(messages)
    return [agreed.weight_of(message) for message in messages]


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
        "the weights were changed on ranks 0 and 2, but not on rank 1, so ranks differ (an "
        "optimizer step, load_state_dict or an assignment on some ranks alone): make it on all ranks"
    )
    assert "there were 2 changes in place on rank 1, 4 on rank 2: make" in difference_of([None, 2, 4], [0, 5, 7])
    assert difference_of([3, 0, None], [5, 5, 0]) == ""  # a rank has restored what it had changed


@pytest.mark.parametrize(
    ("messages", "before", "warned"),
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
def test_a_warning_if_batch_sizes_seem_to_differ(
    messages: list[ControlMessage], before: bool, warned: str | None
) -> None:
    warning = agree(messages).warning(before)
    assert (warning is None) == (warned is None)
    assert warned is None or (warned in str(warning) and "unisono.add_samples(model, n)" in str(warning))


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=70))
def test_first_dimensions_that_differ_are_seen(firsts: list[int]) -> None:
    assert agree([ControlMessage(first_dimension=first_dimension) for first_dimension in firsts]).uneven == (
        len(set(firsts)) > 1
    )


def test_first_dimensions_too_large_to_compare_give_no_warning() -> None:
    assert not agree([ControlMessage(first_dimension=(1 << 40) + 1)] * 100).uneven


@given(st.lists(SAID | UNSAID | ABSENT, min_size=1, max_size=3 * RANKS_PER_NUMBER))
def test_control_messages_of_any_number_of_ranks(messages: list[ControlMessage]) -> None:
    agreed = agree(messages)
    samples_given, without_samples = (
        [message for message in messages if message.samples is not None],
        [message for message in messages if message.samples is None and not message.absent],
    )
    assert agreed.samples_given == len(samples_given)
    assert agreed.without_samples == tuple(rank for rank, message in enumerate(messages) if message in without_samples)
    assert set(agreed.requests) == frozenset().union(*(message.requests for message in messages))
    for kind, who in agreed.requests.items():
        ranks = [rank for rank, message in enumerate(messages) if kind in message.requests]
        assert who == (f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks")
    assert (agreed.error() is not None) == bool((samples_given and without_samples) or "skip" in agreed.requests)
    if not (samples_given and without_samples):
        total = sum(agreed.weight_of(message) for message in messages)
        assert total == pytest.approx(1.0 if any(message.contributes for message in messages) else 0.0)


@pytest.mark.parametrize("samples", [-1, -0.5, float("nan"), float("inf"), float("-inf")])
def test_invalid_numbers_of_samples(samples: float) -> None:
    with pytest.raises(UsageError, match="0 or more"):
        of().add_samples(samples)


def arrive(own: ControlMessage, *others: ControlMessage) -> None:
    """Let the messages of the other ranks arrive, from rank 1 on."""
    messages = [own, *others]
    encoded = [encode(message, rank, len(messages)) for rank, message in enumerate(messages)]
    own.result = decode([sum(column) for column in zip(*encoded, strict=True)])


def begin(control: StepControl) -> ControlMessage:
    return control.begin(absent=False)


def of(rank: int = 0, ranks: int = 2) -> StepControl:
    return StepControl(rank, ranks, lambda: None)


def test_samples_add_up_until_the_pass_ends() -> None:
    control = of()
    control.add_samples(3)
    control.add_samples(2)
    assert begin(control).samples == 5
    control.end_pass()
    assert begin(control).samples is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_first_dimension_of_the_last_input_is_sent() -> None:
    control = of()
    assert control.record_input(torch.ones(4, 2))
    assert not control.record_input(torch.ones(6, 2))
    assert begin(control).first_dimension == 6
    control.end_pass()
    assert control.record_input(torch.tensor(1.0))
    assert begin(control).first_dimension == 1
    control.record_input(torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(4, 2)]))
    assert begin(control).first_dimension == 2


def test_weights_that_are_expected_leave_no_trace_in_bits() -> None:
    """Without samples it is that of equal ranks; with samples a power of two, which as many have had before."""
    assert begin(of(ranks=3)).expected_weight == 1 / 3
    control = of()
    assert control.begin(absent=True).expected_weight is None
    for others, expected in ((4.0, None), (3.0, 0.5), (4.0, None)):  # 4 of 8, then 4 of 7
        control.add_samples(4)
        message = begin(control)
        assert message.expected_weight == expected
        arrive(message, ControlMessage(others))
        control.end_pass()
    control.add_samples(3)
    assert begin(control).expected_weight is None


def test_a_request_is_sent_once() -> None:
    control = of()
    control.request("save")
    message = begin(control)
    arrive(message)
    assert message.requests == {"save"}
    assert begin(control).requests == frozenset()
    with pytest.raises(UsageError, match="there is no request"):
        control.request("coffee")


def test_a_request_that_was_not_sent_is_made_again() -> None:
    control = of()
    control.request("stop")
    begin(control)  # a step without a control message: no result arrives
    control.request("save")
    assert begin(control).requests == {"save", "stop"}


def test_a_request_of_a_failed_pass_is_made_again() -> None:
    control = of()
    control.request("stop")
    control.add_samples(2)
    control.discard(begin(control), newest=True)
    again = begin(control)
    assert (again.requests, again.samples) == ({"stop"}, None)


def test_requests_wait_for_the_last_message() -> None:
    waited: list[ControlMessage] = []

    def wait() -> None:
        arrive(waited[-1], ControlMessage(requests=frozenset({"join", "save"})))

    control = StepControl(0, 2, wait)
    assert control.requests() == {}
    control.request("save")
    waited.append(begin(control))
    assert control.requests() == {"save": "2 ranks", "join": "rank 1"}
    assert control.requested_by_all("save")
    assert not control.requested_by_all("join")


def test_an_error_is_raised_once() -> None:
    control = of()
    control.add_samples(2)
    message = begin(control)
    control.check()  # nothing is known
    arrive(message, ControlMessage())
    with pytest.raises(UsageError, match="rank 1 has not given the number of samples"):
        control.check()
    control.check()
    control.end_pass()
    control.add_samples(2)
    arrive(begin(control), ControlMessage())
    with pytest.raises(UsageError, match="rank 1"):
        control.check()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_warns_once(rank: int) -> None:
    control = of(rank)
    for expected in (not rank, False):
        control.record_input(torch.ones(4))
        arrive(begin(control), ControlMessage(first_dimension=6))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            control.check()
            control.check()
        assert len(caught) == expected
        control.end_pass()


def test_samples_that_are_no_longer_given_are_missed() -> None:
    control = of()
    for samples in (4.0, None):
        control.samples = samples
        arrive(begin(control), ControlMessage(samples))
        if samples is None:
            with pytest.warns(UserWarning, match="given for an earlier average"):
                control.check()
        else:
            control.check()
        control.end_pass()
