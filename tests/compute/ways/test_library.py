"""PyTorch's own convolution, in both memory formats."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.compute.geometry import Geometry, Pass
from unisono.compute.ways.library import CHANNELS_FIRST, CHANNELS_LAST
from unisono.compute.ways.way import Way

EACH = pytest.mark.parametrize("way", [CHANNELS_LAST, CHANNELS_FIRST], ids=["last", "first"])


@EACH
@given(data=st.data(), seed=st.integers(0, 1))
def test_any_layer(way: Way, layers: Any, data: st.DataObject, seed: int) -> None:
    geometry = data.draw(layers.geometries())
    assert way.fits(geometry)
    layers.check_way(way, geometry, seed, 1e-5)


@EACH
def test_pictures_come_out_channels_last(layers: Any, way: Way) -> None:
    geometry = Geometry(2, 4, 8, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float32)
    given = layers.tensors(geometry, 0)
    for which in (Pass.FORWARD, Pass.INPUT):
        assert way.compute(which, geometry, *given[which]).is_contiguous(memory_format=torch.channels_last)
