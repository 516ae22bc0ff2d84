"""Agreement on a step: every rank decodes the same sum, whatever the ranks have found in `.grad`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import MismatchError, UsageError
from unisono.reducer.scattered_gradient import ScatteredGradient
from unisono.reducer.step_agreement import GradientUse, StepMessage, StepResult, decode, encode, use_of

PARAMETERS = 4

NAMES = ("a", "b", "c", "d")

MADE = StepMessage(True)


def agreed(messages: Sequence[StepMessage]) -> StepResult:
    """Return the result of the ranks' messages."""
    ranks = len(messages)
    sums = torch.tensor([encode(one, PARAMETERS, rank, ranks) for rank, one in enumerate(messages)]).double().sum(0)
    return decode(sums.tolist(), PARAMETERS, ranks)


MESSAGES = st.builds(
    StepMessage, st.booleans(), st.dictionaries(st.integers(0, PARAMETERS - 1), st.sampled_from(GradientUse))
)


@settings(deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=100))
def test_messages_add_up(messages: list[StepMessage]) -> None:
    result = agreed(messages)
    assert result.missing == tuple(rank for rank, one in enumerate(messages) if not one.made)
    for number in range(PARAMETERS):
        for use in GradientUse:
            count = sum(one.uses.get(number) == use for one in messages)
            assert result.uses.get(number, (0,) * len(GradientUse))[use] == count


def test_a_step_of_all_ranks_is_made() -> None:
    result = agreed([MADE, MADE])
    assert (result.is_made(), result.error(NAMES), result.removed) == (True, None, frozenset())
    result = agreed([StepMessage(True, {1: GradientUse.REMOVED})] * 2)
    assert (result.is_made(), result.error(NAMES), result.removed) == (True, None, {1})


def test_a_step_that_all_ranks_leave_out_is_no_error() -> None:
    result = agreed([StepMessage()] * 3)
    assert (result.is_made(), result.error(NAMES)) == (False, None)


@pytest.mark.parametrize(
    ("messages", "kind", "words"),
    [
        ([MADE, StepMessage(), MADE], MismatchError, "rank 1 of 3 has left out the optimizer.step"),
        ([MADE, *[StepMessage()] * 2], MismatchError, "ranks 1 and 2 of 3 have left out the optimizer.step"),
        ([MADE, StepMessage(True, {2: GradientUse.REMOVED})], MismatchError, "parameter c has no gradient on 1 of 2"),
        ([MADE, StepMessage(True, {3: GradientUse.STALE})], UsageError, "parameter d .* of an earlier backward pass"),
        ([MADE, StepMessage(True, {0: GradientUse.REPLACED})], UsageError, "parameter a .* Sharded has not summed"),
    ],
)
def test_other_steps_are_made_on_no_rank(messages: list[StepMessage], kind: type[Exception], words: str) -> None:
    result = agreed(messages)
    assert not result.is_made()
    with pytest.raises(kind, match=words):
        raise result.error(NAMES) or AssertionError


def test_changes_are_found_in_grad() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    placeholder = ScatteredGradient(parameter, "a")
    assert use_of(placeholder, placeholder) is None
    assert use_of(None, None) is None
    assert use_of(None, placeholder) is GradientUse.REMOVED
    assert use_of(torch.ones(2), placeholder) is GradientUse.REPLACED
    assert use_of(ScatteredGradient(parameter, "a"), placeholder) is GradientUse.REPLACED
    placeholder.take_added()
    assert use_of(placeholder, placeholder) is GradientUse.STALE
