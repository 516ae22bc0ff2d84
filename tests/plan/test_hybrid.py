import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.convolution_loops import ConvolutionLoops
from unisono.plan.hybrid import (
    NodeLink,
    block_flops,
    forward_bytes,
    forward_seconds,
    hybrid_volume,
    shape_of,
    whole_groups,
)
from unisono.plan.model_parallel import LayerShape, best_groups, hybrid_bytes

FC = ConvolutionLoops(4096, 4096)
WIDE = shape_of(FC)

shapes = st.builds(
    LayerShape, st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 9, 25]), st.integers(1, 5000)
)
overlaps = st.sampled_from([0.0, 0.5, 1.0])


def test_the_worked_example() -> None:
    sent, received = forward_bytes(WIDE, 256, 4)
    assert (sent, received) == (4 * 1024 * 256, 3 * 4 * 1024 * 256)
    assert block_flops(FC, 256, 4) == 2 * 1024 * 1024 * 256
    assert forward_seconds(FC, 256, 4, NodeLink(1e12, 1e9, 1e-5)) == pytest.approx(6.35e-3, abs=5e-6)


def test_sizes_of_a_convolution() -> None:
    assert shape_of(ConvolutionLoops(64, 128, (10, 12), (3, 5))) == LayerShape(64, 128, 15, 12 * 16)


@given(shapes, st.integers(1, 512), st.integers(1, 64))
def test_sent_and_received_are_the_whole_input(shape: LayerShape, minibatch: int, nodes: int) -> None:
    assert sum(forward_bytes(shape, minibatch, nodes)) == pytest.approx(4 * shape.ifm * shape.area * minibatch)


@given(shapes, st.integers(1, 512), st.integers(2, 64), st.data())
def test_the_parts_are_the_volume(shape: LayerShape, minibatch: int, nodes: int, data: st.DataObject) -> None:
    groups, overlap = data.draw(st.integers(1, nodes)), data.draw(overlaps)
    parts = hybrid_volume(shape, minibatch, nodes, groups, overlap)
    assert sum(parts) == pytest.approx(hybrid_bytes(shape, minibatch, nodes, groups, overlap))


@given(shapes, st.integers(1, 512), st.integers(2, 64), overlaps)
def test_no_whole_number_of_groups_sends_less(shape: LayerShape, minibatch: int, nodes: int, overlap: float) -> None:
    volumes = [hybrid_bytes(shape, minibatch, nodes, groups, overlap) for groups in range(1, nodes + 1)]
    chosen = whole_groups(shape, minibatch, nodes, overlap)
    assert volumes[chosen - 1] == pytest.approx(min(volumes))
    assert volumes[chosen - 1] <= volumes[best_groups(shape, minibatch, nodes, overlap) - 1] * (1 + 1e-12)


def test_neighbours_of_the_papers_example() -> None:
    """It prints G = 3; its equation gives 2, no better than 1, and 3 groups send 277 to their 256 (times 8 ifm)."""
    assert [hybrid_bytes(WIDE, 256, 64, groups) / (8 * 4096) for groups in (1, 2)] == [256, 256]
    assert hybrid_bytes(WIDE, 256, 64, 3) / (8 * 4096) == pytest.approx(277, abs=0.5)
    assert whole_groups(WIDE, 256, 64) == 1
    assert whole_groups(WIDE, 256, 64, overlap=1) == 3
