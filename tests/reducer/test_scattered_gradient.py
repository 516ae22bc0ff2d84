"""Placeholders of gradients in shards, and the agreement of ranks on a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import MismatchError, UsageError
from unisono.reducer.scattered_gradient import (
    GradientUse,
    ScatteredGradient,
    StepResult,
    clear,
    scatter,
    step_numbers,
    step_result,
    use_of,
)


def linear() -> torch.nn.Linear:
    """Layer whose gradients are in shards."""
    model = torch.nn.Linear(3, 2)
    scatter(list(model.parameters()), ["weight", "bias"], lambda _: True)
    return model


def test_whatever_reads_it_is_refused() -> None:
    model = linear()
    assert model.weight.grad is not None
    for read in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: 2 * model.weight.grad,
        lambda: model.weight.grad.add_(model.weight),
        lambda: 2 * model.weight.grad.data,
        lambda: setattr(model.weight.grad, "data", torch.ones(2, 3)),
        model.weight.grad.untyped_storage,
        model.half,
        lambda: torch.optim.SGD(model.parameters(), 0.1).step(),
    ):
        with pytest.raises(UsageError, match=r"the gradient of parameter weight, which Sharded .*Sharded\(clip"):
            read()
    model.to(torch.float32)
    model.share_memory()
    assert isinstance(model.weight.grad, ScatteredGradient)


def test_it_is_cleared_and_printed() -> None:
    model = linear()
    assert repr(model.weight.grad) == "ScatteredGradient((2, 3))"
    assert model.weight.grad is not None
    assert model.weight.grad.data_ptr() == 0
    model.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize("foreach", [False, True])
def test_zeros_take_its_place(foreach: bool) -> None:
    model = linear()
    torch.optim.Adam(model.parameters(), foreach=foreach).zero_grad(set_to_none=False)
    for parameter in model.parameters():
        assert type(parameter.grad) is torch.Tensor
        assert parameter.grad.eq(0).all()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.eq(1).all()


def test_a_backward_pass_adds_to_it_and_makes_it_stale() -> None:
    model = linear()
    placeholder = model.weight.grad
    assert isinstance(placeholder, ScatteredGradient)
    assert not placeholder.stale
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is placeholder
    assert placeholder.stale
    added = placeholder.take_added()
    assert added is not None
    assert added.eq(2).all()
    assert placeholder.take_added() is None


def test_placeholders_mark_the_gradients_that_there_are() -> None:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (3, 2, 1)]
    parameters[1].grad = torch.ones(2)
    scatter(parameters, "abc", lambda index: index != 1)
    assert [type(parameter.grad) for parameter in parameters] == [ScatteredGradient, type(None), ScatteredGradient]
    first = parameters[0].grad
    scatter(parameters, "abc", lambda index: index == 1)
    assert parameters[0].grad is first
    assert isinstance(parameters[1].grad, ScatteredGradient)
    parameters[2].grad = torch.ones(1)
    clear(parameters)
    assert [type(parameter.grad) for parameter in parameters] == [type(None), type(None), torch.Tensor]


PARAMETERS = 4

NAMES = ("a", "b", "c", "d")

Uses = dict[int, GradientUse]

LEFT_OUT = None


def agreed(messages: Sequence[Uses | None]) -> StepResult:
    """Return the result of the ranks' messages."""
    ranks = len(messages)
    numbers = [step_numbers(message, PARAMETERS, rank, ranks) for rank, message in enumerate(messages)]
    return step_result(torch.tensor(numbers).double().sum(0).tolist(), PARAMETERS, ranks)


MESSAGES = st.none() | st.dictionaries(st.integers(0, PARAMETERS - 1), st.sampled_from(GradientUse))


@given(st.lists(MESSAGES, min_size=1, max_size=100))
def test_messages_add_up(messages: list[Uses | None]) -> None:
    result = agreed(messages)
    assert result.missing == tuple(rank for rank, message in enumerate(messages) if message is None)
    for parameter in range(PARAMETERS):
        for use in GradientUse:
            count = sum(message is not None and message.get(parameter) == use for message in messages)
            assert result.uses.get(parameter, (0,) * len(GradientUse))[use] == count


def test_a_step_of_all_ranks_is_made() -> None:
    result = agreed([{}, {}])
    assert (result.is_made(), result.error(NAMES), result.removed) == (True, None, frozenset())
    result = agreed([{1: GradientUse.REMOVED}] * 2)
    assert (result.is_made(), result.error(NAMES), result.removed) == (True, None, {1})


def test_a_step_that_all_ranks_leave_out_is_no_error() -> None:
    result = agreed([LEFT_OUT] * 3)
    assert (result.is_made(), result.error(NAMES)) == (False, None)


@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        ([{}, LEFT_OUT, {}], MismatchError, "rank 1 of 3 has left out the optimizer.step"),
        ([{}, LEFT_OUT, LEFT_OUT], MismatchError, "ranks 1 and 2 of 3 have left out the optimizer.step"),
        ([{}, {2: GradientUse.REMOVED}], MismatchError, "parameter c has no gradient on 1 of 2"),
        ([{}, {3: GradientUse.STALE}], UsageError, "parameter d .* of an earlier backward pass"),
        ([{}, {0: GradientUse.REPLACED}], UsageError, "parameter a .* Sharded has not summed"),
    ],
)
def test_other_steps_are_made_on_no_rank(messages: list[Uses | None], kind: type[Exception], message: str) -> None:
    result = agreed(messages)
    assert not result.is_made()
    with pytest.raises(kind, match=message):
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
