"""PCL-DNN's equations of sections 3.2 and 3.3, by its own examples, and the closed form against all divisors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.model_parallel import (
    LayerShape,
    best_groups,
    hybrid_bytes,
    ideal_groups,
    prefers_model_parallelism,
)

WIDE = LayerShape(4096, 4096)
shapes = st.builds(
    LayerShape, st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 9, 25]), st.integers(1, 50_000)
)
overlaps = st.sampled_from([0.0, 0.5, 1.0])


@pytest.mark.parametrize("shape", [LayerShape(64, 128, 9, 112 * 112), LayerShape(512, 512, 9, 14 * 14)])
def test_convolutions_are_not_split(shape: LayerShape) -> None:
    assert not prefers_model_parallelism(shape, 64)
    assert best_groups(shape, 256, 32) == 32


def test_fully_connected_layers_are_split_where_they_have_more_outputs_than_the_minibatch_has_samples() -> None:
    assert prefers_model_parallelism(WIDE, 4095, overlap=1)
    assert not prefers_model_parallelism(WIDE, 4096, overlap=1)
    assert prefers_model_parallelism(LayerShape(2048, 2048), 256, overlap=1)
    assert not prefers_model_parallelism(LayerShape(2048, 2048), 5001, overlap=1)


def test_the_example_of_the_paper() -> None:
    """With overlap 1 the ideal is 2.8, and 3 groups are the best whole number; as the equation is printed it is 2."""
    assert ideal_groups(WIDE, 256, 64, overlap=1) == pytest.approx(8**0.5)
    volumes = {groups: hybrid_bytes(WIDE, 256, 64, groups, overlap=1) for groups in range(1, 65)}
    assert min(volumes, key=volumes.__getitem__) == 3
    assert volumes[3] < min(volumes[1], volumes[2], volumes[4])
    assert best_groups(WIDE, 256, 64, overlap=1) in (2, 4)  # 3 does not divide 64
    assert ideal_groups(WIDE, 256, 64) == 2
    assert hybrid_bytes(WIDE, 256, 64, 2) == hybrid_bytes(WIDE, 256, 64, 1) == 8 * 4096 * 256


def test_the_worked_example() -> None:
    assert ideal_groups(WIDE, 256, 4) == 0.5
    volumes = [hybrid_bytes(WIDE, 256, 4, groups) / 1e6 for groups in (1, 2, 4)]
    assert volumes == [pytest.approx(one, abs=0.05) for one in (8.4, 71.3, 134.2)]
    assert best_groups(WIDE, 256, 4) == 1


@given(shapes, st.integers(1, 10_000), st.integers(1, 96), overlaps)
def test_the_closed_form_is_as_good_as_all_divisors(
    shape: LayerShape, minibatch: int, nodes: int, overlap: float
) -> None:
    volumes = [hybrid_bytes(shape, minibatch, nodes, one, overlap) for one in range(1, nodes + 1) if nodes % one == 0]
    found = best_groups(shape, minibatch, nodes, overlap)
    assert nodes % found == 0
    assert hybrid_bytes(shape, minibatch, nodes, found, overlap) == pytest.approx(min(volumes), rel=1e-12)


@given(shapes, st.integers(1, 10_000), overlaps)
def test_the_criterion_compares_one_exchange_of_activations_with_the_weights(
    shape: LayerShape, minibatch: int, overlap: float
) -> None:
    data = hybrid_bytes(shape, minibatch, 2, 2, overlap)
    assert prefers_model_parallelism(shape, minibatch, overlap) == (data > hybrid_bytes(shape, minibatch, 2, 1) / 2)
