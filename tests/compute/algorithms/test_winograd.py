"""Winograd convolution: tiles as products of polynomials."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.compute.algorithms import winograd
from unisono.compute.algorithms.library import CHANNELS_LAST
from unisono.compute.algorithms.winograd import WINOGRAD, Transforms
from unisono.compute.geometry import Geometry, Pass

SHAPES = [(4, 3), (2, 3), (2, 5), (3, 2), (5, 2), (1, 3)]


@pytest.mark.parametrize(("outputs", "kernel"), SHAPES)
def test_one_dimension_is_a_correlation(outputs: int, kernel: int) -> None:
    transforms = Transforms(outputs, kernel)
    generator = np.random.default_rng(0)
    inputs, weight = generator.normal(size=transforms.tile), generator.normal(size=kernel)
    result = transforms.output_transform @ (
        (transforms.filter_transform @ weight) * (transforms.input_transform @ inputs)
    )
    np.testing.assert_allclose(result, np.correlate(inputs, weight, "valid"), atol=1e-12)


def test_the_known_matrices_of_f_2_3() -> None:
    transforms = Transforms(2, 3)
    assert transforms.input_transform.tolist() == [[-1, 0, 1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]]
    assert transforms.filter_transform.tolist() == [[-1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]
    assert transforms.output_transform.tolist() == [[1, 1, 1, 0], [0, 1, -1, 1]]


@pytest.mark.parametrize("name", WINOGRAD)
@given(data=st.data(), seed=st.integers(0, 1))
def test_any_layer(name: str, layers: Any, data: st.DataObject, seed: int) -> None:
    geometry = data.draw(layers.geometries())
    layers.check_algorithm(WINOGRAD[name], geometry, seed, 1e-4)


@pytest.mark.parametrize("groups", [1, 2])
@given(size=st.tuples(st.integers(3, 14), st.integers(3, 14)), padding=st.integers(0, 2), samples=st.integers(1, 5))
def test_layers_that_fit(layers: Any, groups: int, size: tuple[int, int], padding: int, samples: int) -> None:
    geometry = Geometry(
        samples, 2 * groups, 3 * groups, size, (3, 3), (1, 1), (padding,) * 2, (1, 1), groups, torch.float32
    )
    assert WINOGRAD["winograd 4x4, 3x3"].fits(geometry)
    layers.check_algorithm(WINOGRAD["winograd 4x4, 3x3"], geometry, 0, 1e-4)


@pytest.mark.parametrize(
    ("tiles", "samples", "rows"),
    [(8, [(0, 2), (2, 4), (4, 5)], [(0, 2)]), (3, [(first, first + 1) for first in range(5)], [(0, 1), (1, 2)])],
)
def test_some_tiles_at_once(
    layers: Any,
    monkeypatch: pytest.MonkeyPatch,
    tiles: int,
    samples: list[tuple[int, int]],
    rows: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(winograd, "TILES_PER_BLOCK", tiles)
    chunks = list(winograd._blocks(5, (2, 2)))
    assert [(some.start, some.stop) for some, _ in chunks] == samples
    assert all([(block.top, block.bottom) for block in blocks] == rows for _, blocks in chunks)
    geometry = Geometry(5, 2, 3, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float32)
    layers.check_algorithm(WINOGRAD["winograd 4x4, 3x3"], geometry, 0, 1e-4)


def test_float16_is_not_supported() -> None:
    geometry = Geometry(1, 2, 3, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float16)
    assert not any(each.fits(geometry) for each in WINOGRAD.values())


@pytest.mark.parametrize(
    ("outputs", "kernel", "dtype", "error"),
    [
        (2, 3, torch.bfloat16, 0.006),
        (4, 3, torch.bfloat16, 0.02),
        (2, 5, torch.bfloat16, 0.02),
        (4, 3, torch.float32, 2e-6),
    ],
)
def test_error_beside_an_exact_sum(outputs: int, kernel: int, dtype: torch.dtype, error: float) -> None:
    geometry = Geometry(4, 32, 32, (16, 16), (kernel,) * 2, (1, 1), (1, 1), (1, 1), 1, dtype)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 32, 16, 16, generator=generator).to(dtype)
    weight = torch.randn(32, 32, kernel, kernel, generator=generator).to(dtype)
    slopes = torch.randn(4, 32, *geometry.output_size, generator=generator).to(dtype)
    this, exact = winograd.winograd(outputs, kernel), replace(geometry, dtype=torch.float64)
    for which, tensors in {
        Pass.FORWARD: (inputs, weight),
        Pass.GRAD_INPUT: (slopes, weight),
        Pass.GRAD_WEIGHT: (inputs, slopes),
    }.items():
        right = CHANNELS_LAST.compute(which, exact, *(each.double() for each in tensors))
        result = this.compute(which, geometry, *tensors)
        assert float((result.double() - right).norm() / right.norm()) < error


def test_double_precision_is_exact() -> None:
    geometry = Geometry(2, 3, 2, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float64)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 3, 9, 7, dtype=torch.float64, generator=generator)
    weight = torch.randn(2, 3, 3, 3, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        winograd.winograd(4, 3).forward(geometry, inputs, weight), torch.nn.functional.conv2d(inputs, weight, padding=1)
    )
