"""A 1 x 1 convolution as a matrix product."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from unisono.compute.algorithms.product import PRODUCT


@given(data=st.data(), seed=st.integers(0, 1))
def test_any_layer(layers: Any, data: st.DataObject, seed: int) -> None:
    geometry = data.draw(layers.geometries())
    layers.check_algorithm(PRODUCT, geometry, seed, 1e-5)


@given(data=st.data())
def test_fits_1x1_kernels(layers: Any, data: st.DataObject) -> None:
    geometry = data.draw(layers.geometries())
    is_1x1 = geometry.kernel == (1, 1) and geometry.padding == (0, 0) and geometry.groups == 1
    assert PRODUCT.fits(geometry) == is_1x1
