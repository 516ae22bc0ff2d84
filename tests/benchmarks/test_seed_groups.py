"""PCL-DNN's equations of sections 3.2 and 3.3, by its own examples, and the closed form against all numbers."""

from __future__ import annotations

import pytest
from benchmarks.seeds.groups import (
    LayerShape,
    hybrid_bytes,
    model_forward_bytes,
    model_forward_seconds,
    moved_hybrid_bytes,
    prefers_model_parallelism,
    whole_groups,
)
from benchmarks.seeds.overlap import Machine
from hypothesis import given
from hypothesis import strategies as st

WIDE = LayerShape(4096, 4096)
shapes = st.builds(
    LayerShape, st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 9, 25]), st.integers(1, 50_000)
)
overlaps = st.sampled_from([0.0, 0.5, 1.0])


@pytest.mark.parametrize("shape", [LayerShape(64, 128, 9, 112 * 112), LayerShape(512, 512, 9, 14 * 14)])
def test_convolutions_are_not_split(shape: LayerShape) -> None:
    assert not prefers_model_parallelism(shape, 64)
    assert whole_groups(shape, 256, 32) == 32


def test_fully_connected_layers_are_split_where_they_have_more_outputs_than_the_minibatch_has_samples() -> None:
    assert prefers_model_parallelism(WIDE, 4095, overlap=1)
    assert not prefers_model_parallelism(WIDE, 4096, overlap=1)
    assert prefers_model_parallelism(LayerShape(2048, 2048), 256, overlap=1)
    assert not prefers_model_parallelism(LayerShape(2048, 2048), 5001, overlap=1)


def test_the_example_of_the_paper() -> None:
    """It prints G = 3; its equation gives 2, no better than 1, and 3 groups send 277 to their 256 (times 8 ifm)."""
    assert [hybrid_bytes(WIDE, 256, 64, groups) / (8 * 4096) for groups in (1, 2)] == [256, 256]
    assert hybrid_bytes(WIDE, 256, 64, 3) / (8 * 4096) == pytest.approx(277, abs=0.5)
    assert whole_groups(WIDE, 256, 64) == 1
    assert whole_groups(WIDE, 256, 64, overlap=1) == 3


def test_what_the_paper_prints_of_3_groups_is_without_the_part_that_a_node_keeps() -> None:
    sent = [moved_hybrid_bytes(WIDE, 256, 64, groups) / (8 * 4096) for groups in (1, 2, 3, 4)]
    assert sent == pytest.approx([256, 192, 213 + 1 / 3, 256])


def test_the_worked_example() -> None:
    volumes = [hybrid_bytes(WIDE, 256, 4, groups) / 1e6 for groups in (1, 2, 4)]
    assert volumes == [pytest.approx(volume, abs=0.05) for volume in (8.4, 71.3, 134.2)]
    assert whole_groups(WIDE, 256, 4) == 1


def test_the_forward_pass_of_model_parallelism() -> None:
    """4 nodes with 2 of 8 input maps each, of 3 x 3 elements; 5 output maps of 2 x 2, kernels of 2 x 2; 10 samples."""
    shape = LayerShape(8, 5, kernel=4, area=9, out_area=4)
    received, sent = model_forward_bytes(shape, 10, 4)
    assert (received, sent) == (4 * 2 * 9 * 10 * 3, 4 * 2 * 9 * 10)
    computing = 2 * 8 * 5 * 4 * 4 * 10 / 4
    seconds = model_forward_seconds(shape, 10, 4, Machine(computing=1000.0, communication=100.0), latency=0.5)
    assert seconds == pytest.approx(computing / 1000 + 4 * 8 * 9 * 10 / 100 + 0.5)


@given(shapes, st.integers(1, 10_000), st.integers(2, 96), overlaps)
def test_no_whole_number_of_groups_sends_less(shape: LayerShape, minibatch: int, nodes: int, overlap: float) -> None:
    volumes = [hybrid_bytes(shape, minibatch, nodes, groups, overlap) for groups in range(1, nodes + 1)]
    assert volumes[whole_groups(shape, minibatch, nodes, overlap) - 1] == pytest.approx(min(volumes))


@given(shapes, st.integers(1, 10_000), overlaps)
def test_the_criterion_compares_one_exchange_of_activations_with_the_weights(
    shape: LayerShape, minibatch: int, overlap: float
) -> None:
    data = hybrid_bytes(shape, minibatch, 2, 2, overlap)
    assert prefers_model_parallelism(shape, minibatch, overlap) == (data > hybrid_bytes(shape, minibatch, 2, 1) / 2)
