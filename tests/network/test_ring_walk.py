"""Rings in closed form, beside walks round by round and beside simulations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.network import Network, NetworkError, Uneven, shaped, simulate
from unisono.network.ring_walk import ring_ends, simulate_ring
from unisono.placement import one_rank_per_node, place, regular
from unisono.schedules import find


def round_by_round(weights: list[float], rounds: int, eager: bool) -> np.ndarray:
    weight, ends = np.array(weights), np.zeros(len(weights))
    for _ in range(rounds):
        arrived = (ends if eager else np.maximum(ends, np.roll(ends, -1))) + weight
        ends = np.maximum(arrived, np.roll(arrived, 1))
    return ends


@given(
    weights=st.lists(st.sampled_from([1.0, 1.5, 2.0, 7.0]), min_size=2, max_size=12),
    more=st.integers(0, 3),
    eager=st.booleans(),
)
def test_the_heaviest_walk_is_that_of_all_rounds(weights: list[float], more: int, eager: bool) -> None:
    rounds = 2 * (len(weights) - 1) + more
    ends, links = ring_ends(np.array(weights), rounds, eager)
    np.testing.assert_allclose(ends, round_by_round(weights, rounds, eager))
    assert all(weights[links[rank]] == max(weights) for rank in np.flatnonzero(ends == ends.max()))


def test_the_worked_example() -> None:
    assert ring_ends(np.array([1.0, 3.0, 1.0, 1.0]), 6, eager=True)[0].tolist() == [14, 18, 18, 16]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1, 2, 1), (1, 5, 1), (2, 3, 1), (3, 1, 1), (2, 2, 2), (1, 3, 4), (1, 1, 3)]),
    slow=st.dictionaries(st.integers(0, 5), st.sampled_from([1.5, 4.0, 30.0]), max_size=3),
    oversubscribed=st.sampled_from([0, 1, 20]),
    eager=st.sampled_from([0, 1 << 20]),
    overhead=st.sampled_from([0, 1e-5]),
)
def test_a_ring_is_its_simulation(
    shape: tuple[int, int, int], slow: dict[int, float], oversubscribed: float, eager: int, overhead: float
) -> None:
    placement = regular(*shape)
    uneven = Uneven({node: times for node, times in slow.items() if node < len(placement.nodes)})
    links = vars(shaped(10e6, shape[1], oversubscribed)) | {"overhead": overhead}
    network, nbytes = Network(**links), 240 * placement.ranks
    done = simulate_ring(placement, network, nbytes, eager, uneven)
    exact = simulate(find("ring", placement).allreduce, placement, network, nbytes, nbytes, 1, eager, uneven=uneven)
    assert done.ends == pytest.approx(exact.ends, rel=1e-6)
    assert done.seconds == max(done.ends)
    assert sum(delay.seconds for delay in done.delays) == pytest.approx(done.seconds)
    assert (done.messages, done.node_bytes) == (exact.messages, pytest.approx(exact.node_bytes))


def test_ranks_that_are_not_in_the_order_of_their_nodes() -> None:
    placement, network = place("abab"), shaped(10e6)
    done = simulate_ring(placement, network, 4000, 0, Uneven({1: 3.0}))
    exact = simulate(find("ring", placement).allreduce, placement, network, 4000, 4000, 1, 0, uneven=Uneven({1: 3.0}))
    assert done.ends == pytest.approx(exact.ends)


def test_what_has_no_closed_form() -> None:
    with pytest.raises(NetworkError, match="a ring of 4 ranks is simulated without late ranks"):
        simulate_ring(one_rank_per_node(4), shaped(1e9), 4000, uneven=Uneven({}, {1: 0.1}))
    with pytest.raises(NetworkError, match="8 bytes are less than an element for each of the 4 ranks"):
        simulate_ring(one_rank_per_node(4), shaped(1e9), 8)
