"""Linear layers with the weight gradient first have PyTorch's bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reducer.weight_first.alike import assert_alike, however_small, taken
from torch import nn
from torch.nn import functional

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 9), st.integers(1, 9), st.booleans(), DTYPES)
@settings(max_examples=60)
def test_outputs_and_gradients_are_those_of_pytorch(
    shape: list[int], ins: int, outs: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    assert_alike(nn.Linear(ins, outs, bias=bias, dtype=dtype), torch.randn(*shape, ins, dtype=dtype))


def test_a_frozen_bias_has_no_gradient() -> None:
    layer = nn.Linear(3, 4)
    layer.bias.requires_grad_(False)
    assert_alike(layer, torch.randn(2, 3))
    assert layer.bias.grad is None


def test_complex_numbers_have_the_gradients_of_pytorch() -> None:
    layer, inputs = nn.Linear(3, 4, dtype=torch.complex128), torch.randn(2, 3, dtype=torch.complex128)
    own = copy.deepcopy(layer)
    taken(layer)
    with however_small():
        for one in (layer, own):
            one(inputs.requires_grad_()).abs().square().sum().backward()
    assert torch.equal(layer.weight.grad, own.weight.grad)


class Doubled(nn.Parameter):
    """Weight with a product of its own: twice PyTorch's."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        return 2 * found if function is functional.linear else found


def test_a_weight_of_another_class_has_its_own_product() -> None:
    layer, inputs = nn.Linear(3, 4, bias=False), torch.randn(2, 3, requires_grad=True)
    (2 * layer(inputs)).sum().backward()
    wanted = layer.weight.grad
    layer.weight = Doubled(layer.weight.data)
    taken(layer)
    with however_small():
        layer(inputs).sum().backward()
    assert torch.equal(layer.weight.grad, wanted)


def test_where_it_does_not_pay_the_graph_is_that_of_pytorch() -> None:
    layer, inputs = nn.Linear(3, 4), torch.randn(2, 3, requires_grad=True)
    taken(layer)
    assert layer(inputs).grad_fn.name() == "AddmmBackward0"  # too small
    with however_small():
        assert layer(inputs.detach()).grad_fn.name() == "AddmmBackward0"  # the first layer's input
        assert layer(inputs[0]).grad_fn.name() == nn.Linear(3, 4)(inputs[0]).grad_fn.name()  # without samples
        layer.weight = nn.Parameter(torch.ones(4, 3))
        assert layer(inputs).grad_fn.name() == "AddmmBackward0"  # a weight that the reducer does not have
