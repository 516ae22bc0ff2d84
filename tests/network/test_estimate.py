from fractions import Fraction

import pytest

from unisono.network import Network, estimate, price, shaped, simulate
from unisono.placement import one_rank_per_node, regular
from unisono.schedules import find
from unisono.schedules.ring import ring


def test_one_piece_of_a_ring_is_exact() -> None:
    network = Network(Fraction(1, 7), Fraction(1, 11), Fraction(1, 13))
    n = Fraction(4000)
    assert estimate(ring, one_rank_per_node(4), network, n) == price(ring, one_rank_per_node(4), network, n)


@pytest.mark.parametrize(
    ("name", "off"),
    [("ring", 0.1), ("direct", 0.1), ("halving", 0.1), ("flat", 0.1), ("hierarchical", 0.1), ("tree", 0.3)],
)
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 4, 1), (2, 2, 2)])
@pytest.mark.parametrize("nbytes", [1 << 18, 1 << 24])
def test_estimate_is_near_simulation(name: str, off: float, shape: tuple[int, int, int], nbytes: int) -> None:
    placement = regular(*shape)
    network = shaped(10e9, shape[1], 2)
    algorithm = find(name, placement).allreduce
    simulated = simulate(algorithm, placement, network, nbytes).seconds
    assert estimate(algorithm, placement, network, nbytes) == pytest.approx(simulated, rel=off)


def test_estimate_includes_waits_of_a_chain() -> None:
    tiny = estimate(find("pipeline", one_rank_per_node(16)).allreduce, one_rank_per_node(16), shaped(10e9), 4)
    assert tiny == pytest.approx(30 * 25e-6, rel=0.01)


def test_few_crossing_messages_are_not_charged_for_all() -> None:
    placement = regular(4, 8, 1)
    network = shaped(10e9, 8, 4)
    algorithm = find("ring", placement).allreduce
    n = 1 << 22
    assert estimate(algorithm, placement, network, n) < price(algorithm, placement, network, n) / 2


def test_sampled_ranks_represent_many() -> None:
    placement = regular(2, 256, 1)
    network = shaped(10e9, 256, 4)
    algorithm = find("halving", placement).allreduce
    simulated = simulate(algorithm, placement, network, 1 << 26).seconds
    assert estimate(algorithm, placement, network, 1 << 26) == pytest.approx(simulated, rel=0.02)
