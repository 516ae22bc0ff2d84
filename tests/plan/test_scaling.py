import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.model_parallel import LayerShape
from unisono.plan.scaling import LinkSpeed, ScaledLayer, epoch_seconds, last_worthwhile, strong_scaling, weak_speedup

EXAMPLE = [ScaledLayer(3e-3, 250_000), ScaledLayer(1e-3, 1_000_000, LayerShape(1000, 1000))]

layers = st.lists(
    st.builds(
        ScaledLayer,
        st.floats(1e-4, 1e-2),
        st.integers(0, 10**6),
        st.none() | st.builds(LayerShape, st.integers(1, 5000), st.integers(1, 5000), st.just(1), st.just(1)),
    ),
    min_size=1,
    max_size=6,
)
links = st.builds(LinkSpeed, st.floats(1e7, 1e11), st.floats(0, 1e-4))


def test_the_worked_example() -> None:
    step = strong_scaling(EXAMPLE, LinkSpeed(1e9), 8, 4)
    assert step.computing == pytest.approx(8e-3)
    assert step.bubble == 0
    assert step.activations == pytest.approx(64e-6)
    assert step.speedup == pytest.approx(3.97, abs=0.005)


def test_a_transfer_forward_and_one_backward_have_a_latency() -> None:
    slow = strong_scaling(EXAMPLE, LinkSpeed(1e9, 1e-3), 8, 4)
    assert slow.activations == pytest.approx(64e-6 + 2e-3)


def test_what_computing_does_not_hide_is_a_bubble() -> None:
    step = strong_scaling(EXAMPLE[:1], LinkSpeed(1e8), 8, 4)  # 10 ms of exchange behind 2 ms
    assert step.bubble == pytest.approx(8e-3)
    assert step.speedup == pytest.approx(24 / 14)


@given(layers, links, st.integers(1, 512), st.integers(1, 64))
def test_a_step_is_the_sum_of_its_parts(network: list[ScaledLayer], link: LinkSpeed, batch: int, nodes: int) -> None:
    step = strong_scaling(network, link, batch, nodes)
    alone = batch * sum(layer.seconds for layer in network)
    assert step.seconds == pytest.approx(step.computing + step.bubble + step.activations)
    assert step.speedup == pytest.approx(alone / step.seconds)
    assert 0 < step.speedup <= nodes * (1 + 1e-9)


@given(layers, links, st.integers(1, 512), st.integers(2, 64))
def test_a_faster_link_never_slows(network: list[ScaledLayer], link: LinkSpeed, batch: int, nodes: int) -> None:
    faster = link._replace(bandwidth=2 * link.bandwidth)
    step = strong_scaling(network, link, batch, nodes)
    assert strong_scaling(network, faster, batch, nodes).seconds <= step.seconds * (1 + 1e-9)


def test_shares_of_communication_give_swcaffes_speedups() -> None:
    """Figures 10 and 11, of 1,024 nodes; AlexNet with 256, 128, 64 samples a node, ResNet-50 with 32."""
    for share, speedup in ((0.3013, 715.45), (0.4515, 561.58), (0.6001, 409.50), (0.1911, 828.32)):
        assert weak_speedup(1024, 1 - share, share) == pytest.approx(speedup, rel=1e-3)


def test_a_last_smaller_minibatch_is_a_step() -> None:
    assert epoch_seconds(1000, 256, 0.5) == 2.0
    assert epoch_seconds(1024, 256, 0.5) == 2.0
    assert epoch_seconds(1025, 256, 0.5) == 2.5


def test_the_last_worthwhile_number_is_before_the_first_that_adds_too_little() -> None:
    speedups = [(1, 1.0), (2, 2.0), (4, 2.9), (8, 6.9)]
    assert last_worthwhile(speedups) == 2
    assert last_worthwhile(speedups, 0.4) == 8
    assert last_worthwhile(speedups[:1]) == 1
