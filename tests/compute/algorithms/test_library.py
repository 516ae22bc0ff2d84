"""PyTorch's own convolution, in both memory formats."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.compute.algorithms.library import CHANNELS_FIRST, CHANNELS_LAST
from unisono.compute.geometry import ConvolutionAlgorithm, Geometry, Pass

EACH = pytest.mark.parametrize("algorithm", [CHANNELS_LAST, CHANNELS_FIRST], ids=["last", "first"])


@EACH
@given(data=st.data(), seed=st.integers(0, 1))
def test_any_layer(algorithm: ConvolutionAlgorithm, layers: Any, data: st.DataObject, seed: int) -> None:
    geometry = data.draw(layers.geometries())
    assert algorithm.fits(geometry)
    layers.check_algorithm(algorithm, geometry, seed, 1e-5)


@EACH
@pytest.mark.parametrize("in_channels", [1, 3, 5, 15])
@pytest.mark.parametrize("stride", [(2, 1), (1, 2), (2, 2), (3, 3)])
def test_strides_with_few_channels(
    layers: Any, algorithm: ConvolutionAlgorithm, in_channels: int, stride: tuple[int, int]
) -> None:
    for out_channels, size in itertools.product((1, 8), ((8, 8), (13, 14))):
        geometry = Geometry(3, in_channels, out_channels, size, (1, 1), stride, (0, 0), (1, 1), 1, torch.float32)
        for seed in range(2):
            layers.check_algorithm(algorithm, geometry, seed, 1e-5)


@EACH
def test_results_are_channels_last(layers: Any, algorithm: ConvolutionAlgorithm) -> None:
    geometry = Geometry(2, 4, 8, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float32)
    given = layers.tensors(geometry, 0)
    for which in (Pass.FORWARD, Pass.GRAD_INPUT):
        assert algorithm.compute(which, geometry, *given[which]).is_contiguous(memory_format=torch.channels_last)
