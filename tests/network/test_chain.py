import pytest

from unisono.network import shaped
from unisono.network.chain import MAX_CHAINED_TRANSFERS, chain_seconds, count_transfers, with_sources
from unisono.network.price import spread
from unisono.placement import one_rank_per_node
from unisono.schedules import find


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
    found, whole = (chain_seconds(each, placement, network, chunk, network.beta, {}) for each in (some, everyone))
    assert found <= whole
    assert found == pytest.approx(whole, rel=0.2)


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
