"""Layers of all kinds, and what their three passes give when PyTorch computes them in float64."""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from unisono.compute.geometry import Geometry, Pass
from unisono.compute.ways.way import Way

Given = dict[Pass, tuple[Tensor, Tensor]]


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Small layers: kernels of 1 to 5, strides, padding, groups, pictures that tiles do not divide."""
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (3, 3), (5, 5), (1, 3), (2, 4)]))
    stride = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (2, 1)]))
    padding = draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1]))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (1, 1), (2, 1)]))
    least = 2 * (max(kernel) - 1) + 1
    return Geometry(
        samples=draw(st.integers(1, 3)),
        before=groups * draw(st.integers(1, 5)),
        after=groups * draw(st.integers(1, 4)),
        size=(draw(st.integers(least, 13)), draw(st.integers(least, 13))),
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=torch.float32,
    )


def tensors(geometry: Geometry, seed: int) -> Given:
    """What each pass is given."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(geometry.samples, geometry.before, *geometry.size, generator=generator)
    weight = torch.randn(geometry.after, geometry.before // geometry.groups, *geometry.kernel, generator=generator)
    gradient = torch.randn(geometry.samples, geometry.after, *geometry.places, generator=generator)
    if seed % 2:
        inputs, gradient = (one.contiguous(memory_format=torch.channels_last) for one in (inputs, gradient))
    return {Pass.FORWARD: (inputs, weight), Pass.INPUT: (gradient, weight), Pass.WEIGHT: (inputs, gradient)}


def expected(geometry: Geometry, given: Given) -> dict[Pass, Tensor]:
    """The three results in float64."""
    inputs, weight = (one.double().contiguous().requires_grad_() for one in given[Pass.FORWARD])
    outputs = torch.nn.functional.conv2d(
        inputs, weight, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    )
    outputs.backward(given[Pass.INPUT][0].double())
    assert inputs.grad is not None
    assert weight.grad is not None
    return {Pass.FORWARD: outputs.detach(), Pass.INPUT: inputs.grad, Pass.WEIGHT: weight.grad}


def check_way(way: Way, geometry: Geometry, seed: int, tolerance: float) -> None:
    """The passes that fit are right, to `tolerance` of the largest sum of what is added, signs aside."""
    given = tensors(geometry, seed)
    right = expected(geometry, given)
    added = expected(geometry, {which: (first.abs(), second.abs()) for which, (first, second) in given.items()})
    for which, pair in given.items():
        if way.fits(geometry):
            before = [one.clone() for one in pair]
            found = way.compute(which, geometry, *pair)
            assert found.shape == right[which].shape
            assert found.dtype == geometry.dtype
            assert float((found.double() - right[which]).abs().max()) <= tolerance * float(added[which].max())
            assert all(torch.equal(one, other) for one, other in zip(pair, before, strict=True))


class Layers:
    """What the tests of ways share."""

    geometries = staticmethod(geometries)
    tensors = staticmethod(tensors)
    expected = staticmethod(expected)
    check_way = staticmethod(check_way)


@pytest.fixture(scope="session")
def layers() -> Layers:
    """Layers of all kinds."""
    return Layers()
