import random
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from unisono.measure.links import Pair, pairings, slow_links, supernodes


@given(st.integers(0, 20), st.integers(0, 60), st.integers(0, 99))
def test_pairings_contain_every_pair_once(nodes: int, rounds: int, seed: int) -> None:
    drawn = pairings(nodes, rounds, seed)
    assert len(drawn) == (rounds if nodes > 1 else 0)
    for pairs in drawn:
        paired = [node for pair in pairs for node in pair]
        assert len(set(paired)) == len(paired) == nodes - nodes % 2
    cycle = nodes - 1 + nodes % 2
    if nodes > 1 and rounds >= cycle:
        assert {pair for pairs in drawn[:cycle] for pair in pairs} == set(combinations(range(nodes), 2))


def shared(pairs: list[Pair], group: tuple[int, ...], uplink: float) -> list[tuple[Pair, float]]:
    """The speeds when all pairs exchange at once and those that cross share an uplink of so many times a link."""
    crossing = [pair for pair in pairs if group[pair[0]] != group[pair[1]]]
    load = {index: sum(index in (group[a], group[b]) for a, b in crossing) for index in set(group)}
    return [
        (pair, min(1.0, *(uplink / load[group[node]] for node in pair)) if pair in crossing else 1.0) for pair in pairs
    ]


@given(st.integers(2, 4), st.integers(3, 6), st.sampled_from([4.0, 8.0]), st.randoms(use_true_random=False))
def test_groups_are_found_for_any_order_of_nodes(
    count: int, each: int, oversubscribed: float, chance: random.Random
) -> None:
    group = [index for index in range(count) for _ in range(each)]
    chance.shuffle(group)
    renamed = {name: index for index, name in enumerate(dict.fromkeys(group))}
    expected = tuple(renamed[name] for name in group)
    speeds = [
        (pair, speed * chance.uniform(0.93, 1.07))
        for pairs in pairings(len(group), 4 * len(group), chance.randrange(99))
        for pair, speed in shared(pairs, expected, each / oversubscribed)
    ]
    assert supernodes(len(group), speeds) == expected


@given(st.integers(1, 16), st.randoms(use_true_random=False))
def test_one_switch_is_one_supernode(nodes: int, chance: random.Random) -> None:
    speeds = [(pair, chance.uniform(0.8, 1.0)) for pairs in pairings(nodes, 20) for pair in pairs]
    assert supernodes(nodes, speeds) == (0,) * nodes


def test_a_slow_link_is_that_of_a_node_whose_pairs_are_all_slow() -> None:
    pairs = [(node, peer) for node in range(4) for peer in range(node + 1, 4)]
    assert slow_links(4, [(pair, 25.0 if 3 in pair else 100.0) for pair in pairs]) == {3: 4.0}
    assert slow_links(4, [(pair, 70.0 if 3 in pair else 100.0) for pair in pairs]) == {}


def test_narrow_uplinks_are_no_slow_links() -> None:
    pairs = [(node, peer) for node in range(4) for peer in range(node + 1, 4)]
    assert slow_links(4, [(pair, 100.0 if pair in ((0, 1), (2, 3)) else 10.0) for pair in pairs]) == {}


def test_a_late_exchange_makes_no_slow_link() -> None:
    speeds = [((0, 1), speed) for speed in (100.0, 1.0, 100.0)] + [((2, 3), 100.0)] * 3
    assert slow_links(4, speeds) == {}


def test_two_nodes_have_one_pair_and_none_is_slow() -> None:
    assert slow_links(2, [((0, 1), 3.0)]) == {}
    assert slow_links(1, []) == {}
