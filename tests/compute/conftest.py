"""Layers of all kinds, and the results of their three passes from PyTorch in float64."""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from unisono.compute.geometry import ConvolutionAlgorithm, Geometry, Pass

Given = dict[Pass, tuple[Tensor, Tensor]]


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Small layers: kernels of 1 to 5, strides, padding, groups, images that tiles do not divide."""
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (3, 3), (5, 5), (1, 3), (2, 4)]))
    stride = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (2, 1)]))
    padding = draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1]))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (1, 1), (2, 1)]))
    least = 2 * (max(kernel) - 1) + 1
    return Geometry(
        samples=draw(st.integers(1, 3)),
        in_channels=groups * draw(st.integers(1, 5)),
        out_channels=groups * draw(st.integers(1, 4)),
        size=(draw(st.integers(least, 13)), draw(st.integers(least, 13))),
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=torch.float32,
    )


def tensors(geometry: Geometry, seed: int) -> Given:
    """Tensors for each pass."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(geometry.samples, geometry.in_channels, *geometry.size, generator=generator)
    weight = torch.randn(
        geometry.out_channels, geometry.in_channels // geometry.groups, *geometry.kernel, generator=generator
    )
    gradient = torch.randn(geometry.samples, geometry.out_channels, *geometry.output_size, generator=generator)
    if seed % 2:
        inputs, gradient = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (inputs, gradient))
    return {Pass.FORWARD: (inputs, weight), Pass.GRAD_INPUT: (gradient, weight), Pass.GRAD_WEIGHT: (inputs, gradient)}


def expected(geometry: Geometry, given: Given) -> dict[Pass, Tensor]:
    """The three results in float64."""
    inputs, weight = (tensor.double().contiguous().requires_grad_() for tensor in given[Pass.FORWARD])
    outputs = torch.nn.functional.conv2d(
        inputs, weight, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    )
    outputs.backward(given[Pass.GRAD_INPUT][0].double())
    assert inputs.grad is not None
    assert weight.grad is not None
    return {Pass.FORWARD: outputs.detach(), Pass.GRAD_INPUT: inputs.grad, Pass.GRAD_WEIGHT: weight.grad}


def check_algorithm(algorithm: ConvolutionAlgorithm, geometry: Geometry, seed: int, tolerance: float) -> None:
    """The passes that fit are right, to `tolerance` of the largest sum of absolute values."""
    given = tensors(geometry, seed)
    right = expected(geometry, given)
    added = expected(geometry, {which: (first.abs(), second.abs()) for which, (first, second) in given.items()})
    for which, pair in given.items():
        if algorithm.fits(geometry):
            before = [tensor.clone() for tensor in pair]
            result = algorithm.compute(which, geometry, *pair)
            assert result.shape == right[which].shape
            assert result.dtype == geometry.dtype
            assert float((result.double() - right[which]).abs().max()) <= tolerance * float(added[which].max())
            assert all(torch.equal(tensor, old) for tensor, old in zip(pair, before, strict=True))


class Layers:
    """What the tests of algorithms share."""

    geometries = staticmethod(geometries)
    tensors = staticmethod(tensors)
    expected = staticmethod(expected)
    check_algorithm = staticmethod(check_algorithm)


@pytest.fixture(scope="session")
def layers() -> Layers:
    """Layers of all kinds."""
    return Layers()
