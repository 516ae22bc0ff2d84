from fractions import Fraction

import pytest

from unisono.network import Network, Uneven, estimate, price, shaped, simulate
from unisono.network.estimate import MAX_CHAINED_TRANSFERS, chain_seconds, count_transfers, with_sources
from unisono.network.price import spread
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
    n = 1 << 22
    wide, narrow = shaped(10e9, 8, 1), shaped(10e9, 8, 4)  # whose uplink is still twice a node's link
    ring, halving = (find(name, placement).allreduce for name in ("ring", "halving"))
    for cost in (estimate, price):
        assert cost(ring, placement, narrow, n) == pytest.approx(cost(ring, placement, wide, n))
        assert cost(halving, placement, narrow, n) > 2 * cost(halving, placement, wide, n)


def test_sampled_ranks_represent_many() -> None:
    placement = regular(2, 256, 1)
    network = shaped(10e9, 256, 4)
    algorithm = find("halving", placement).allreduce
    simulated = simulate(algorithm, placement, network, 1 << 26).seconds
    assert estimate(algorithm, placement, network, 1 << 26) == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize("name", ["tree", "multicolor", "pipeline"])
@pytest.mark.parametrize("ranks", [300, 512])
def test_waits_of_chains_through_many_ranks_are_included(name: str, ranks: int) -> None:
    placement = one_rank_per_node(ranks)
    algorithm = find(name, placement).allreduce
    simulated = simulate(algorithm, placement, shaped(10e9), 4).seconds
    assert estimate(algorithm, placement, shaped(10e9), 4) == pytest.approx(simulated, rel=0.1)
    assert estimate(algorithm, placement, shaped(10e9), 4) > 2 * price(algorithm, placement, shaped(10e9), 4)


@pytest.mark.parametrize(("name", "ranks"), [("ring", 16), ("direct", 16), ("halving", 16), ("halving", 300)])
def test_a_slow_link_slows_an_estimate_as_a_simulation(name: str, ranks: int) -> None:
    placement, network, nbytes = one_rank_per_node(ranks), shaped(10e9), 1 << 22
    algorithm = find(name, placement).allreduce
    uneven = Uneven({3: 8.0})
    before, after = (
        estimate(algorithm, placement, network, nbytes),
        estimate(algorithm, placement, network, nbytes, uneven=uneven),
    )
    slower = simulate(algorithm, placement, network, nbytes, uneven=uneven).seconds
    assert after > 2 * before
    assert after == pytest.approx(slower, rel=0.5)


def test_sources_are_the_ranks_on_the_way_of_a_result() -> None:
    placement = one_rank_per_node(8)
    tree = find("tree", placement).allreduce
    assert sorted(with_sources([3, 7], tree, 8)) == [0, 2, 3, 4, 6, 7]
    assert sorted(with_sources([5], find("pipeline", placement).allreduce, 8)) == [0, 1, 2, 3, 4, 5]
    assert sorted(with_sources([1], find("halving", placement).allreduce, 8)) == [1, 5]


@pytest.mark.parametrize("name", ["tree", "multicolor", "multicolor/8", "halving", "pipeline"])
@pytest.mark.parametrize("ranks", [64, 100, 256])
@pytest.mark.parametrize("chunk", [4.0, 1e6])
def test_the_chain_of_some_is_that_of_all(name: str, ranks: int, chunk: float) -> None:
    """Full nodes' links are charged by `estimate`, so a chain takes one message after another here."""
    placement, network = one_rank_per_node(ranks), shaped(10e9)
    algorithm = find(name, placement).allreduce
    everyone = {rank: algorithm(rank, ranks) for rank in range(ranks)}
    some = with_sources(spread(ranks, 16), algorithm, ranks)
    of_some, of_all = (chain_seconds(each, placement, network, chunk, network.beta, {}) for each in (some, everyone))
    assert of_some <= of_all
    assert of_some == pytest.approx(of_all, rel=0.2)


def test_programs_that_are_too_long_have_no_sources() -> None:
    placement = one_rank_per_node(400)
    ring = find("ring", placement).allreduce
    assert count_transfers(ring(0, 400)) * 400 > MAX_CHAINED_TRANSFERS
    assert with_sources(range(0, 400, 4), ring, 400) == {}


def test_a_slow_link_takes_longer() -> None:
    placement, network = one_rank_per_node(8), shaped(10e9)
    tree = find("tree", placement).allreduce
    programs = {rank: tree(rank, 8) for rank in range(8)}
    seconds = [
        chain_seconds(programs, placement, network, 1e6, network.beta, slow) for slow in ({}, {7: 1.0}, {7: 4.0})
    ]
    assert seconds[0] == seconds[1] < seconds[2]
