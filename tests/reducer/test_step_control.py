"""Control messages of one rank, with simulated results of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from unisono.errors import UsageError
from unisono.reducer.control import ControlMessage, ControlResult, decode, encode
from unisono.reducer.step_control import StepControl


@dataclass
class InFlight:
    """Message of a pass; `others` are those of the other ranks, from rank 1 on."""

    control_message: ControlMessage
    others: Sequence[ControlMessage] = ()
    control_result: ControlResult | None = None

    def arrive(self) -> None:
        messages = [self.control_message, *self.others]
        words = [encode(one, rank, len(messages)) for rank, one in enumerate(messages)]
        self.control_result = decode([sum(column) for column in zip(*words, strict=True)])


def begin(control: StepControl, *others: ControlMessage) -> InFlight:
    message = InFlight(control.next_message(absent=False), others)
    control.begin(message)
    return message


def of(rank: int = 0, ranks: int = 2) -> StepControl:
    return StepControl(rank, ranks, lambda: None)


def test_samples_add_up_until_the_pass_ends() -> None:
    control = of()
    control.add_samples(3)
    control.add_samples(2)
    assert control.next_message(absent=False).samples == 5
    control.end_pass()
    assert control.next_message(absent=False).samples is None


def test_the_first_dimension_of_the_last_input_is_sent() -> None:
    control = of()
    assert control.record_input(torch.ones(4, 2))
    assert not control.record_input(torch.ones(6, 2))
    assert control.next_message(absent=False).first_dimension == 6
    control.end_pass()
    assert control.record_input(torch.tensor(1.0))
    assert control.next_message(absent=False).first_dimension == 1


def test_a_request_is_sent_once() -> None:
    control = of()
    control.request("save")
    message = begin(control)
    message.arrive()
    assert message.control_message.requests == {"save"}
    assert control.next_message(absent=False).requests == frozenset()
    with pytest.raises(UsageError, match="there is no request"):
        control.request("coffee")


def test_a_request_that_was_not_sent_is_made_again() -> None:
    control = of()
    control.request("stop")
    begin(control)  # a step without a control message: no result arrives
    control.request("save")
    assert control.next_message(absent=False).requests == {"save", "stop"}


def test_a_request_of_a_failed_pass_is_made_again() -> None:
    control = of()
    control.request("stop")
    control.add_samples(2)
    message = begin(control)
    control.discard()
    control.renew(message.control_message)
    again = control.next_message(absent=False)
    assert (again.requests, again.samples) == ({"stop"}, None)


def test_requests_wait_for_the_last_message() -> None:
    waited: list[InFlight] = []

    def wait() -> None:
        waited[-1].arrive()

    control = StepControl(0, 2, wait)
    assert control.requests() == {}
    control.request("save")
    waited.append(begin(control, ControlMessage(requests=frozenset({"join", "save"}))))
    assert control.requests() == {"save": "2 ranks", "join": "rank 1"}
    assert control.requested_by_all("save")
    assert not control.requested_by_all("join")


def test_an_error_is_raised_once() -> None:
    control = of()
    control.add_samples(2)
    message = begin(control, ControlMessage())
    control.check()  # nothing is known
    message.arrive()
    with pytest.raises(UsageError, match="rank 1 has not given the number of samples"):
        control.check()
    control.check()
    control.end_pass()
    control.add_samples(2)
    begin(control, ControlMessage()).arrive()
    with pytest.raises(UsageError, match="rank 1"):
        control.check()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_warns_once(rank: int) -> None:
    control = of(rank)
    for expected in (not rank, False):
        control.record_input(torch.ones(4))
        begin(control, ControlMessage(first_dimension=6)).arrive()
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
        begin(control, ControlMessage(samples)).arrive()
        if samples is None:
            with pytest.warns(UserWarning, match="given for an earlier average"):
                control.check()
        else:
            control.check()
        control.end_pass()
