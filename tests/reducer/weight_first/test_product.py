"""Two nodes of the graph: their order, what accumulates, and everything else that autograd does with them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.reducer.weight_first.alike import however_small, taken
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.reducer.weight_first.convolution import ConvolutionProduct
from unisono.reducer.weight_first.linear import LinearProduct
from unisono.reducer.weight_first.product import Product, compute
from unisono.reducer.weight_first.readings import Reading, Readings

PRODUCTS: dict[str, tuple[Product, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (LinearProduct(), (3, 4), (5, 4)),
    "convolution": (ConvolutionProduct((1, 1), (1, 1), (1, 1), 1), (2, 2, 4, 4), (3, 2, 3, 3)),
}


def reading_of(weight: Tensor) -> Reading:
    reading = Readings([weight], 2, lambda: None).of(weight)
    assert reading is not None
    return reading


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()


def test_a_gradient_is_accumulated_before_the_grad_input_and_the_reading_ends_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, events = two_layers(), list[str]()
    readings = taken(model)
    own = LinearProduct.grad_input

    def recorded(*parts: Tensor) -> Tensor:
        events.append(f"input, over {readings.are_over(range(4))}")
        return own(*parts)

    monkeypatch.setattr(LinearProduct, "grad_input", recorded)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: events.append(f"{name}, over {readings.are_over(range(4))}"))
    with however_small():
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    last = ["2.weight, over False", "2.bias, over False"]
    assert sorted(events[:2]) == sorted(last)
    assert events[2] == "input, over False"
    assert sorted(events[3:]) == ["0.bias, over True", "0.weight, over True"], "the first layer has PyTorch's order"
    assert readings.are_over(range(4))


@pytest.mark.parametrize("name", PRODUCTS)
def test_first_and_second_gradients_are_right(name: str) -> None:
    product, shape, size = PRODUCTS[name]
    torch.manual_seed(0)
    parts = (torch.randn(one, dtype=torch.float64, requires_grad=True) for one in (shape, size, size[:1]))

    def function(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return compute(product, inputs * 2, weight, bias, reading_of(weight)).tanh()

    inputs, weight, bias = parts
    assert torch.autograd.gradcheck(function, (inputs, weight, bias))
    assert torch.autograd.gradgradcheck(function, (inputs, weight, bias))


def test_a_gradient_is_not_copied_when_it_is_accumulated() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    made: list[int] = []

    class Recording(LinearProduct):
        def grad_weight(
            self, gradient: Tensor, inputs: Tensor, weight: Tensor, biased: bool
        ) -> tuple[Tensor, Tensor | None]:
            own, bias = super().grad_weight(gradient, inputs, weight, biased)
            made.append(own.data_ptr())
            return own, bias

    inputs = torch.randn(3, 4, requires_grad=True)
    compute(Recording(), inputs, weight, None, reading_of(weight)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == made[0]


def test_a_weight_that_changes_before_its_grad_input_raises_an_error() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    inputs = torch.randn(3, 4, requires_grad=True)
    outputs = compute(LinearProduct(), inputs, weight, None, reading_of(weight))
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_some_gradients_alone_and_accumulation_are_those_of_pytorch() -> None:
    model, own = two_layers(), two_layers()
    taken(model)
    inputs = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with however_small():
        found = torch.autograd.grad(model(inputs).square().sum(), [model[2].weight, inputs])
        wanted = torch.autograd.grad(own(inputs).square().sum(), [own[2].weight, inputs])
        assert all(map(torch.equal, found, wanted))
        assert all(one.grad is None for one in model.parameters())
        for one in (model, own):
            one(inputs).sum().backward(inputs=[one[2].weight])
            one(inputs).square().sum().backward()
            checkpoint(one, inputs, use_reentrant=False).square().sum().backward()
    for one, other in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_selective_checkpointing_saves_and_recomputes_pytorchs_products() -> None:
    def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    model, own = two_layers(), two_layers()
    model[1], own[1] = nn.Tanh(), nn.Tanh()
    taken(model)
    contexts = partial(create_selective_checkpoint_contexts, save_all)
    inputs = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with however_small():
        for one in (model, own):
            checkpoint(one, inputs, use_reentrant=False, context_fn=contexts).square().sum().backward()
    for one, other in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
