"""PyTorch's own convolution, in both memory formats."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.compute.geometry import Geometry, Pass
from unisono.compute.ways.library import CHANNELS_FIRST, CHANNELS_LAST
from unisono.compute.ways.way import Way

EACH = pytest.mark.parametrize("way", [CHANNELS_LAST, CHANNELS_FIRST], ids=["last", "first"])


@EACH
@settings(max_examples=50)
@given(data=st.data(), seed=st.integers(0, 1))
def test_any_layer(way: Way, layers: Any, data: st.DataObject, seed: int) -> None:
    geometry = data.draw(layers.geometries())
    assert way.fits(geometry)
    layers.check_way(way, geometry, seed, 1e-5)


@EACH
@pytest.mark.parametrize("before", [1, 3, 5, 15])
@pytest.mark.parametrize("stride", [(2, 1), (1, 2), (2, 2), (3, 3)])
def test_a_stride_over_few_channels(layers: Any, way: Way, before: int, stride: tuple[int, int]) -> None:
    for after, size in itertools.product((1, 8), ((8, 8), (13, 14))):
        geometry = Geometry(3, before, after, size, (1, 1), stride, (0, 0), (1, 1), 1, torch.float32)
        for seed in range(10):
            layers.check_way(way, geometry, seed, 1e-5)


@EACH
def test_pictures_come_out_channels_last(layers: Any, way: Way) -> None:
    geometry = Geometry(2, 4, 8, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float32)
    given = layers.tensors(geometry, 0)
    for which in (Pass.FORWARD, Pass.INPUT):
        assert way.compute(which, geometry, *given[which]).is_contiguous(memory_format=torch.channels_last)
