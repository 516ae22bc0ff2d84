"""A model's own layers that follow a plan."""

import copy

import pytest
import torch
from torch import nn

from unisono.compute import convolution_plan
from unisono.compute.algorithms import ALGORITHMS, DEFAULT
from unisono.compute.convolution import PlannedConvolution, plan_convolutions
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.geometry import Pass


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, 2, groups=2),
        nn.Conv2d(8, 4, 1),
        nn.Conv2d(4, 4, 5, padding=2),
        nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"),
    )


def gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    inputs.grad = None
    outputs = model(inputs)
    outputs.square().mean().backward()
    assert inputs.grad is not None
    return [
        outputs.detach(),
        inputs.grad,
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("small", [0, 10**9], ids=["autotuned", "small"])
def test_a_planned_model_is_the_model(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", small)
    plain, plan = network(), ConvolutionPlan()
    planned = copy.deepcopy(plain)
    assert plan_convolutions(planned, plan) == 5
    inputs = torch.randn(2, 3, 9, 9, requires_grad=True)
    for _ in range(2):
        for actual, right in zip(
            gradients(planned, inputs), gradients(plain, inputs.clone().detach().requires_grad_()), strict=True
        ):
            torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)
    assert bool(plan.measured) == (small == 0)
    assert list(planned.state_dict()) == list(plain.state_dict())


class Only(ConvolutionPlan):
    """A plan with a single algorithm, where it fits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.taken = name, set[Pass]()

    def compute(self, which, geometry, first, second):  # type: ignore[no-untyped-def]
        if not ALGORITHMS[self.name].fits(geometry):
            return ALGORITHMS[DEFAULT].compute(which, geometry, first, second)
        self.taken.add(which)
        return ALGORITHMS[self.name].compute(which, geometry, first, second)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains(name: str) -> None:
    plain = network()
    planned = copy.deepcopy(plain)
    plan = Only(name)
    plan_convolutions(planned, plan)
    inputs = torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last).requires_grad_()
    for actual, right in zip(
        gradients(planned, inputs), gradients(plain, inputs.clone().detach().requires_grad_()), strict=True
    ):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)
    assert plan.taken == set(Pass)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_next_layer_may_change_outputs_in_place(name: str, dtype: torch.dtype) -> None:
    kernel = {"product": 1, "winograd 2x2, 5x5": 5}.get(name, 3)
    layer, inputs = nn.Conv2d(4, 4, kernel, bias=False), torch.rand(2, 4, 6, 6)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])  # no output is near to 0, where rounding would decide
    layer.weight = nn.Parameter((0.1 + torch.rand_like(layer.weight)) * signs[:, None, None, None])
    plain = nn.Sequential(copy.deepcopy(layer), nn.ReLU())
    planned = nn.Sequential(layer, nn.ReLU(inplace=True))
    plan = Only(name)
    plan_convolutions(planned, plan)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        outputs, right = planned(inputs), plain(inputs)
        outputs.float().sum().backward()
        right.float().sum().backward()
    torch.testing.assert_close(outputs, right, rtol=0.05, atol=0.5)
    gradient, exact = (next(model.parameters()).grad for model in (planned, plain))
    torch.testing.assert_close(gradient, exact, rtol=0.1, atol=0.5)
    if (name, dtype) != ("shifted", torch.bfloat16):  # which would round each of its sums
        assert Pass.FORWARD in plan.taken


def test_planned_layers_keep_their_plan() -> None:
    model, plan = network(), ConvolutionPlan()
    plan_convolutions(model, plan)
    assert plan_convolutions(model, ConvolutionPlan()) == 0
    assert all(layer.plan is plan for layer in model if isinstance(layer, PlannedConvolution))


def test_a_single_image_and_an_empty_batch() -> None:
    model = network()
    plan_convolutions(model, ConvolutionPlan())
    assert model(torch.randn(3, 9, 9)).shape == (4, 4, 4)
    assert model[0](torch.randn(0, 3, 9, 9)).shape == (0, 8, 9, 9)


def test_frozen_weights_have_no_pass() -> None:
    passes: list[Pass] = []

    class Recording(ConvolutionPlan):
        """A plan that records the passes."""

        def compute(self, which, geometry, first, second):  # type: ignore[no-untyped-def]
            passes.append(which)
            return super().compute(which, geometry, first, second)

    layer = nn.Conv2d(2, 2, 3)
    plan_convolutions(layer, Recording())
    layer.weight.requires_grad_(requires_grad=False)
    layer(torch.randn(1, 2, 5, 5)).sum().backward()
    assert passes == [Pass.FORWARD]
    assert layer.bias is not None
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [9, 9]


def test_autocast_computes_in_sixteen_bits() -> None:
    layer = nn.Conv2d(2, 4, 3, padding=1)
    plain = copy.deepcopy(layer)
    plan_convolutions(layer, ConvolutionPlan())
    inputs = torch.randn(2, 2, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, right = layer(inputs), plain(inputs)
    assert outputs.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(outputs, right, rtol=2e-2, atol=2e-2)
    outputs.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_plan_and_model_can_be_copied() -> None:
    model = network()
    plan_convolutions(model, ConvolutionPlan())
    assert copy.deepcopy(model)(torch.zeros(1, 3, 9, 9)).shape == (1, 4, 4, 4)
