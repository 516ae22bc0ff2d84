"""A matrix product over unfolded inputs."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.compute.algorithms import unfolded
from unisono.compute.algorithms.unfolded import UNFOLDED
from unisono.compute.geometry import Geometry


@given(data=st.data(), seed=st.integers(0, 1))
def test_any_layer(layers: Any, data: st.DataObject, seed: int) -> None:
    geometry = data.draw(layers.geometries())
    layers.check_algorithm(UNFOLDED, geometry, seed, 1e-5)


def test_many_samples_are_unfolded_in_blocks(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfolded, "UNFOLDED_BYTES", 2 * 9 * 3 * 4 * 25)
    geometry = Geometry(5, 3, 4, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float32)
    assert list(unfolded._blocks(geometry)) == [(0, 2), (2, 4), (4, 5)]
    layers.check_algorithm(UNFOLDED, geometry, 0, 1e-5)


def test_sums_of_16_bit_numbers_use_32_bits(layers: Any) -> None:
    geometry = Geometry(2, 8, 8, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.bfloat16)
    given = {
        which: (first.bfloat16(), second.bfloat16()) for which, (first, second) in layers.tensors(geometry, 0).items()
    }
    for which, right in layers.expected(geometry, given).items():
        result = UNFOLDED.compute(which, geometry, *given[which])
        assert result.dtype == torch.bfloat16
        assert float((result.double() - right).abs().max()) <= 2**-8 * float(right.abs().max())
