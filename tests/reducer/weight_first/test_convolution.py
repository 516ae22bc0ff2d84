"""Convolutions with the weight gradient first have PyTorch's bits, with all options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reducer.weight_first.alike import assert_alike, however_small, taken
from torch import nn

from unisono.reducer.weight_first.convolution import operations_of, padding_of

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a convolution whose two sides are padded alike."""
    size, padding = draw(st.sampled_from([1, 2, 3, 5])), draw(st.sampled_from([0, 1, 2, "same", "valid"]))
    stride = 1 if padding == "same" else draw(st.integers(1, 3))
    dilation = 2 if padding == "same" else draw(st.integers(1, 2))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    own = {"kernel_size": size, "padding": padding, "stride": stride, "dilation": dilation, "padding_mode": mode}
    return own | {"groups": draw(st.sampled_from([1, 2])), "bias": draw(st.booleans())}


@given(st.sampled_from(sorted(CONVOLUTIONS)), options(), st.integers(1, 3), DTYPES)
@settings(max_examples=120)
def test_outputs_and_gradients_are_those_of_pytorch(
    dimensions: int, chosen: dict[str, Any], samples: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = CONVOLUTIONS[dimensions](4, 6, dtype=dtype, **chosen)
    assert_alike(layer, torch.randn(samples, 4, *(10,) * dimensions).to(dtype))


def test_channels_last_stays() -> None:
    layer = nn.Conv2d(8, 16, 3, padding=1).to(memory_format=torch.channels_last)
    inputs = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    assert_alike(layer, inputs)
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_padding_is_found() -> None:
    assert padding_of(nn.Conv2d(1, 1, 3, padding=(1, 2))) == (1, 2)
    assert padding_of(nn.Conv2d(1, 1, (3, 5), padding="same")) == (1, 2)
    assert padding_of(nn.Conv2d(1, 1, 2, padding="same", dilation=2)) == (1, 1)
    assert padding_of(nn.Conv2d(1, 1, (3, 4), padding="same")) is None
    assert padding_of(nn.Conv1d(1, 1, 3, padding="valid")) == (0,)
    assert padding_of(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")) == (0,)


def test_operations_are_counted() -> None:
    layer = nn.Conv2d(4, 8, 3, stride=2, padding=1)
    assert operations_of(layer, torch.empty(5, 4, 16, 16)) == 2 * 5 * 8 * 8 * (8 * 4 * 3 * 3)


@pytest.mark.parametrize("shape", [(4, 6, 6), (0, 4, 6, 6)], ids=["without samples", "empty"])
def test_other_inputs_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    layer, inputs = nn.Conv2d(4, 4, 3), torch.randn(shape, requires_grad=True)
    taken(layer)
    with however_small():
        found = layer(inputs)
    assert found.grad_fn.name() == nn.Conv2d(4, 4, 3)(inputs).grad_fn.name()


def test_complex_numbers_have_the_gradients_of_pytorch() -> None:
    layer, inputs = nn.Conv2d(2, 3, 3, dtype=torch.complex64), torch.randn(2, 2, 5, 5, dtype=torch.complex64)
    own = copy.deepcopy(layer)
    taken(layer)
    with however_small():
        for one in (layer, own):
            one(inputs.requires_grad_()).abs().square().sum().backward()
    assert torch.equal(layer.weight.grad, own.weight.grad)


def test_sides_that_differ_are_those_of_pytorch() -> None:
    layer = nn.Conv2d(4, 4, 2, padding="same")
    taken(layer)
    with however_small():
        assert "_GradWeight" not in layer(torch.randn(2, 4, 6, 6, requires_grad=True)).grad_fn.name()
