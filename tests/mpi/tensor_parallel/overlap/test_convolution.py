"""Convolutions whose exchanges run beside their products are the whole layer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.mpi.tensor_parallel.networks import CASES, alone, model_of, train, with_sizes
from torch import nn

import unisono
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.tensor_parallel.model import split_model
from unisono.tensor_parallel.overlap import layer_passes, passes
from unisono.tensor_parallel.overlap.slices import SliceLimits
from unisono.world import World

SLICED: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Conv1d(2, 12, 3, stride=2), (5, 2, 9)),
    (lambda: nn.Conv2d(2, 12, 3, padding=1), (5, 2, 4, 5)),
    (lambda: nn.Conv2d(2, 12, (1, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), bias=False), (5, 2, 4, 4)),
    (lambda: nn.Conv3d(2, 12, 2), (5, 2, 3, 3, 3)),
]

WAITED_FOR: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Conv2d(2, 12, 3, padding=1, padding_mode="reflect"), (5, 2, 4, 4)),
    (lambda: nn.Conv2d(2, 12, 3, padding="same"), (5, 2, 4, 4)),
    (lambda: nn.Conv2d(2, 12, 3), (2, 4, 4)),
]


def split(whole: nn.Module, group: World, most: int) -> nn.Module:
    found = split_model(nn.Sequential(copy.deepcopy(whole)), group, {"0": "column"})
    if group.size > 1:
        found[0].limits = SliceLimits(1, 1, most, most)
    return found


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.relu(model(x), inplace=True)
    (y * torch.arange(y.numel()).view_as(y)).square().sum().backward()
    return y


def compare(whole: nn.Module, found: nn.Module) -> None:
    for name, one in found[0].named_parameters():
        part = getattr(found[0], "parts", {}).get(name)
        own = whole.get_parameter(name).grad
        expected = own if part is None or own is None else part.cut(own)
        torch.testing.assert_close(one.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["", "weight", "input"])
@pytest.mark.parametrize("most", [1, 2, 3, 5])
@pytest.mark.parametrize(("make", "shape"), SLICED + WAITED_FOR)
def test_outputs_and_gradients_are_those_of_the_whole_layer(
    group: World, make: Callable[[], nn.Module], shape: tuple[int, ...], most: int, frozen: str
) -> None:
    torch.manual_seed(3)
    whole, x = make().double(), torch.randn(shape, dtype=torch.float64, requires_grad=frozen != "input")
    whole.weight.requires_grad_(frozen != "weight")
    x_found = x.detach().to(memory_format=torch.channels_last) if x.ndim == 4 else x.detach().clone()
    x_found.requires_grad_(x.requires_grad)
    found = split(whole, group, most)
    torch.testing.assert_close(run(found, x_found), run(whole, x), rtol=1e-12, atol=1e-12)
    if frozen != "input":
        torch.testing.assert_close(x_found.grad, x.grad, rtol=1e-12, atol=1e-12)
    compare(whole, found)


def test_which_layers_are_sliced(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []
    play = passes.play_pass

    def counted(flow: object, x: torch.Tensor, slices: int, *more: object, **named: object) -> object:
        played.append(slices)
        return play(flow, x, slices, *more, **named)

    monkeypatch.setattr(layer_passes, "play_pass", counted)
    for cases, expected in ((SLICED, [2, 2] * (group.size > 1)), (WAITED_FOR, [])):
        for make, shape in cases:
            played.clear()
            run(split(make(), group, 2), torch.randn(shape, requires_grad=True))
            assert played == expected


def test_positions_are_those_of_the_output(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[int, int]] = []
    plan = layer_passes.plan_passes

    def observed(
        flows: object, rows: int, input_bytes: int, output_bytes: int, nodes: int, limits: SliceLimits
    ) -> object:
        planned.append((input_bytes, output_bytes))
        return plan(flows, rows, input_bytes, output_bytes, nodes, limits)

    monkeypatch.setattr("unisono.tensor_parallel.convolution.plan_passes", observed)
    for make, shape in SLICED:
        x = torch.randn(shape)
        y = split(make(), group, 2)(x)
        assert group.size == 1 or planned.pop() == (x.nbytes, y.nbytes)


@pytest.mark.parametrize("plan", CASES["convnet"].plans)
def test_losses_are_those_of_the_whole_network(group: World, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelLayer, "limits", SliceLimits(1, 1, 3, 3))
    case = CASES["convnet"]
    expected, _ = alone(case, group, 20)
    for size in (size for size in (2, 3, 4) if group.size % size == 0):
        model = unisono.parallel(model_of(case), group, plan=with_sizes(case.plans[plan], size))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        assert train(model, optimizer, case, group, range(20)) == pytest.approx(expected, rel=1e-9), size
