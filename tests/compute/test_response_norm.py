"""Local response normalisation over channels."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.compute import response_norm
from unisono.compute.response_norm import ResponseNorm, use_response_norms


@given(
    size=st.integers(1, 6),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)),
    beta=st.sampled_from([0.75, 0.5]),
    last=st.booleans(),
)
def test_it_is_pytorchs(size: int, shape: tuple[int, int, int, int], beta: float, last: bool) -> None:
    plain = nn.LocalResponseNorm(size, alpha=0.3, beta=beta, k=2.0)
    own = copy.deepcopy(plain)
    assert use_response_norms(own) == 1
    memory = torch.channels_last if last else torch.contiguous_format
    inputs = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=memory)
    slope = torch.randn(shape, dtype=torch.float64)
    actual, right = (leaf.requires_grad_() for leaf in (inputs.clone(), inputs.clone()))
    outputs, expected = own(actual), plain(right)
    torch.testing.assert_close(outputs, expected)
    outputs.backward(slope)
    expected.backward(slope)
    torch.testing.assert_close(actual.grad, right.grad)


def test_the_next_layer_may_change_outputs_in_place() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 6, 1), nn.LocalResponseNorm(5), nn.ReLU())
    own, inputs = copy.deepcopy(plain), torch.randn(2, 3, 4, 4)
    own[2] = nn.ReLU(inplace=True)
    assert use_response_norms(own) == 1
    for model in (plain, own):
        model(inputs).sum().backward()
    torch.testing.assert_close(own[0].weight.grad, plain[0].weight.grad)


def test_blocks_of_a_few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_norm, "ELEMENTS_PER_BLOCK", 12)
    inputs = torch.randn(2, 5, 3, 3)
    assert [len(part) for (part,) in response_norm._parts(torch.zeros(2, 3, 3, 5))] == [2] * 9
    own, plain = nn.LocalResponseNorm(5), nn.LocalResponseNorm(5)
    use_response_norms(own)
    torch.testing.assert_close(own(inputs), plain(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    plain = nn.LocalResponseNorm(5, alpha=0.3)
    own = copy.deepcopy(plain)
    use_response_norms(own)
    exact = torch.randn(2, 32, 7, 7, generator=torch.Generator().manual_seed(0)).to(dtype).double().requires_grad_()
    leaf = exact.detach().to(dtype).requires_grad_()
    outputs, expected = own(leaf), plain(exact)
    for result in (outputs, expected):
        result.sum().backward()
    assert leaf.grad is not None
    half_a_unit = torch.finfo(dtype).eps / 2
    for rounded, right in ((outputs, expected), (leaf.grad, exact.grad)):
        assert rounded.dtype == dtype
        torch.testing.assert_close(rounded.double(), right, rtol=half_a_unit, atol=1e-6)  # 1e-6: float32's own error


def test_other_shapes_are_pytorchs() -> None:
    own = nn.Sequential(nn.LocalResponseNorm(3))
    assert use_response_norms(own) == 1
    assert isinstance(own[0], ResponseNorm)
    inputs = torch.randn(2, 5, 3)
    torch.testing.assert_close(own(inputs), nn.LocalResponseNorm(3)(inputs))
    assert own(torch.zeros(0, 5, 3, 3)).shape == (0, 5, 3, 3)
