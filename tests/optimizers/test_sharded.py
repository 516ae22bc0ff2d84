"""Steps on segments are those on whole parameters: bit for bit where the optimizer is elementwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.optimizers import LAMB, LARS
from unisono.optimizers.layerwise import LayerwiseOptimizer
from unisono.optimizers.sharded import (
    ELEMENTWISE,
    Segment,
    SegmentUpdate,
    ShardedStep,
    check_optimizer,
    cut,
    dense_strides,
    join,
    segments_of,
)

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIONS: dict[str, Make] = {
    **{kind.__name__: kind for kind in ELEMENTWISE},  # type: ignore[dict-item]
    "Nesterov": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, foreach=True),
    "AMSGrad": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "LARS": lambda groups: LARS(groups, trust=0.1),
    "LAMB": LAMB,
}

SHAPES = ((3, 4), (5,), (2, 2, 3), (1,), ())

CUTS = [
    [Segment(0, 0, 7), Segment(1, 0, 1), Segment(3, 0, 1)],
    [Segment(0, 7, 12), Segment(1, 1, 5), Segment(2, 0, 12), Segment(4, 0, 1)],
]
"""Segments of two ranks."""


def parameters_of() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "lr": 0.1, "weight_decay": 0.1}, {"params": parameters[2:], "lr": 0.02}]


@pytest.mark.parametrize("name", OPTIONS)
def test_segments_are_stepped_like_wholes(name: str) -> None:
    unsplit, sharded = parameters_of(), parameters_of()
    plain = OPTIONS[name](groups(unsplit))
    optimizers = [OPTIONS[name](groups(sharded)) for _ in CUTS]
    for optimizer, segments in zip(optimizers, CUTS, strict=True):
        for index, parameter in enumerate(sharded):  # Adagrad has a state from the start
            if parameter in optimizer.state:
                mine = [segment for segment in segments if segment.parameter == index]
                optimizer.state |= cut(optimizer.state.pop(parameter), parameter, dense_strides(parameter), mine)  # type: ignore[arg-type]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for index, (expected, actual) in enumerate(zip(unsplit, sharded, strict=True)):
            given = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
            expected.grad = None if index == 3 and step == 1 else given
            actual.grad = None if expected.grad is None else expected.grad.clone()
        plain.step()
        play(optimizers, sharded)
    for index, (expected, actual) in enumerate(zip(unsplit, sharded, strict=True)):
        exact = not isinstance(plain, LayerwiseOptimizer)
        torch.testing.assert_close(expected, actual, rtol=0, atol=0 if exact else 1e-12)
        parts = [(key, state) for optimizer in optimizers for key, state in optimizer.state.items()]
        joined = join([(key, state) for key, state in parts if key.parameter == index], actual, dense_strides(actual))  # type: ignore[attr-defined]
        for key, value in plain.state[expected].items():
            torch.testing.assert_close(joined[key], value, rtol=0, atol=0 if exact else 1e-12)


def play(optimizers: list[torch.optim.Optimizer], parameters: list[torch.nn.Parameter]) -> None:
    """Make one step, of two ranks."""
    updates = []
    for segments in CUTS:
        mine = []
        for segment in segments:
            parameter = parameters[segment.parameter]
            if parameter.grad is not None:
                part = slice(segment.first, segment.last)
                mine.append(
                    SegmentUpdate(segment, parameter.detach().view(-1)[part].clone(), parameter.grad.view(-1)[part])
                )
        updates.append(mine)
    steps = [ShardedStep(optimizer, parameters) for optimizer in optimizers]
    if isinstance(optimizers[0], LayerwiseOptimizer):
        squares = torch.zeros(len(parameters), 2, dtype=torch.float64)
        for step, mine in zip(steps, updates, strict=True):
            for index, *pair in step.measure(mine):
                squares[index] += torch.stack([part.double().square().sum() for part in pair])
        for step in steps:
            step.set_norms(squares)  # type: ignore[arg-type]
    for step, mine in zip(steps, updates, strict=True):
        step.update(mine)
        for segment, weights, _ in mine:
            parameters[segment.parameter].detach().view(-1)[segment.first : segment.last] = weights


def test_options_are_those_of_when_the_step_began() -> None:
    parameters = parameters_of()
    optimizer = torch.optim.SGD(groups(parameters))
    step = ShardedStep(optimizer, parameters)
    optimizer.param_groups[1]["lr"] = 100.0
    weights = torch.zeros(12, dtype=torch.float64)
    step.update([SegmentUpdate(Segment(2, 0, 12), weights, torch.ones(12, dtype=torch.float64))])
    assert weights.eq(-0.02).all()


def test_a_parameter_that_the_optimizer_lacks_is_not_updated() -> None:
    parameters = parameters_of()
    optimizer = torch.optim.SGD(parameters[:2], 0.1)
    weights = torch.zeros(12, dtype=torch.float64)
    update = SegmentUpdate(Segment(2, 0, 12), weights, torch.ones(12, dtype=torch.float64))
    ShardedStep(optimizer, parameters).update([update])
    assert weights.eq(0).all()
    assert not optimizer.state


def test_what_is_not_known_to_be_elementwise_is_refused() -> None:
    (parameter,) = torch.nn.Linear(3, 2, bias=False).parameters()
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon):
        with pytest.raises(UsageError, match=f"{kind.__name__} is not known to update each element by itself"):
            check_optimizer(kind([parameter]))  # type: ignore[operator]
    replaced = torch.optim.SGD([parameter], 0.1)
    replaced.step = lambda: None  # type: ignore[method-assign,assignment]
    with pytest.raises(UsageError, match="the step of SGD was replaced"):
        check_optimizer(replaced)
    scheduled = torch.optim.SGD([parameter], 0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    check_optimizer(scheduled)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 3))
def test_the_ranks_have_every_element_once(lengths: list[int], ranks: int, gap: int) -> None:
    pieces, at = [], 0
    for index, length in enumerate(lengths):
        pieces.append((index, slice(at, at + length), slice(5 * index, 5 * index + length)))
        at += length + gap
    placed = [place for rank in range(ranks) for place in segments_of(pieces, at, ranks, rank)]
    elements = [(place.segment.parameter, element) for place in placed for element in range(*place.segment[1:])]
    assert elements == [(index, 5 * index + e) for index, length in enumerate(lengths) for e in range(length)]
    starts = {index: here.start for index, here, _ in pieces}
    assert all(start - starts[segment.parameter] == segment.first - 5 * segment.parameter for segment, start in placed)
    empty = [index for index, length in enumerate(lengths) if not length]
    assert [place.segment.parameter for place in placed if place.segment.first == place.segment.last] == ranks * empty


@pytest.mark.parametrize(
    "parameter",
    [
        torch.randn(3, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7, dtype=torch.complex128),
        torch.tensor(3.0),
        torch.randn(6, 4).t(),
    ],
    ids=["matrix", "channels last", "complex", "no dimension", "transposed"],
)
def test_what_is_cut_is_joined_again(parameter: torch.Tensor) -> None:
    state: dict[str, Any] = {
        "exp_avg": torch.randn_like(parameter),
        "step": torch.tensor(4.0),
        "momentum_buffer": None,
        "rate": 0.5,
    }
    length = parameter.numel() * (2 if parameter.is_complex() else 1)
    parts = cut(
        state, parameter, dense_strides(parameter), [Segment(0, 0, length // 3), Segment(0, length // 3, length)]
    )
    assert [state["exp_avg"].shape for state in parts.values()] == [(length // 3,), (length - length // 3,)]
    joined = join(list(parts.items()), parameter, dense_strides(parameter))
    assert joined.keys() == state.keys()
    assert torch.equal(joined["exp_avg"], state["exp_avg"])
    assert joined["exp_avg"].stride() == torch.empty_like(parameter).stride()
    assert (joined["step"], joined["momentum_buffer"], joined["rate"]) == (torch.tensor(4.0), None, 0.5)


def test_nothing_is_joined_to_nothing() -> None:
    assert join([], torch.ones(3), (1,)) == {}
