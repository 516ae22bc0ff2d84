"""A sum of shifted products."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.compute.algorithms.shifted import SHIFTED
from unisono.compute.geometry import Geometry


@given(data=st.data(), seed=st.integers(0, 1))
def test_any_layer(layers: Any, data: st.DataObject, seed: int) -> None:
    geometry = data.draw(layers.geometries())
    layers.check_algorithm(SHIFTED, geometry, seed, 1e-5)


def test_padding_wider_than_the_kernel_is_not_supported() -> None:
    geometry = Geometry(1, 3, 4, (5, 5), (3, 3), (1, 1), (3, 1), (1, 1), 1, torch.float32)
    assert not SHIFTED.fits(geometry)
