from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.network import DEFAULT, Network, NetworkError, price, simulate
from unisono.network.links import shaped
from unisono.placement import one_rank_per_node, place, regular
from unisono.schedules import find
from unisono.schedules.direct import direct
from unisono.schedules.ring import ring

ALPHA, BETA, UPLINK, GAMMA = Fraction(1, 7), Fraction(2, 11), Fraction(3, 13), Fraction(5, 17)
"""Fractions, so that equal means equal."""


def log2(p: int) -> int:
    return p.bit_length() - 1


def equation_4(p: int, q: int, n: Fraction, beta_1: Fraction, beta_2: Fraction) -> Fraction:
    """All-gather in order, swCaffe section 5.1."""
    return log2(p) * ALPHA + (q - 1) * beta_1 * n / p + (p - q) * beta_2 * n / p


def equation_3(p: int, q: int, n: Fraction, beta_1: Fraction, beta_2: Fraction) -> Fraction:
    """Reduce-scatter in order."""
    return equation_4(p, q, n, beta_1, beta_2) + Fraction(p - 1, p) * n * GAMMA


def equation_2(p: int, q: int, n: Fraction, beta_1: Fraction, beta_2: Fraction) -> Fraction:
    """Allreduce in order."""
    return equation_3(p, q, n, beta_1, beta_2) + equation_4(p, q, n, beta_1, beta_2)


def equation_6(p: int, q: int, n: Fraction, beta_1: Fraction, beta_2: Fraction) -> Fraction:
    """All-gather numbered round-robin."""
    away = Fraction(p, q)
    return log2(p) * ALPHA + (p - away) * beta_1 * n / p + (away - 1) * beta_2 * n / p


def equation_5(p: int, q: int, n: Fraction, beta_1: Fraction, beta_2: Fraction) -> Fraction:
    """Reduce-scatter numbered round-robin."""
    return equation_6(p, q, n, beta_1, beta_2) + Fraction(p - 1, p) * n * GAMMA


GRID = [(p, q) for p in (2, 4, 16, 64, 256, 1024) for q in (1, 2, 4, 16, 64, 256) if q <= p]


@pytest.mark.parametrize(("p", "q"), GRID)
@pytest.mark.parametrize("times", [1, 12345])
def test_the_price_is_that_of_swcaffe(p: int, q: int, times: int) -> None:
    n = Fraction(p * times)
    placement = regular(p // q, q, 1)
    network = Network(ALPHA, BETA, GAMMA, UPLINK)
    betas = BETA, UPLINK * q
    assert price(find("halving", placement).allreduce, placement, network, n) == equation_2(p, q, n, *betas)
    numbered = price(find("halving/round-robin", placement).allreduce, placement, network, n)
    assert numbered == equation_5(p, q, n, *betas) + equation_6(p, q, n, *betas)


SHAPES = [
    ((0,) * 4 + (1,) * 4 + (2,) * 4),
    (0, 1) * 4,
    (0, 0, 0, 1),
    (0,) * 5 + (1,) * 2 + (2,) * 3,
    (0,) * 16 + (1,) * 16,
]
"""Supernodes of each node: 3 of 4, 2 of 4 whose nodes take turns, 3 and 1, 5 and 2 and 3, 2 of 16."""


@pytest.mark.parametrize("supernodes", SHAPES)
@pytest.mark.parametrize("oversubscription", [1, 4, 40])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_price_of_a_ring_is_what_a_simulation_takes(
    supernodes: tuple[int, ...], oversubscription: float, ranks_per_node: int
) -> None:
    """One node enters and one leaves a supernode, whose uplink carries one node's bytes, not those of all."""
    of_rank = [node for node in range(len(supernodes)) for _ in range(ranks_per_node)]
    placement = place(of_rank, [supernodes[node] for node in of_rank])
    network = replace(shaped(10e9, max(Counter(supernodes).values()), oversubscription), gamma=0, within_alpha=0)
    ring, nbytes = find("ring", placement).allreduce, placement.ranks << 18
    simulated = simulate(ring, placement, network, nbytes, piece_bytes=nbytes)
    assert price(ring, placement, network, nbytes) == pytest.approx(simulated.seconds, rel=0.02)


def test_twelve_hosts_on_three_switches() -> None:
    """A ring takes the time of a node's links, 147 ms for 100 MB, and is cheaper than an exchange of all with all."""
    placement, network = regular(3, 4, 1), replace(shaped(10e9, 4, 4), gamma=0)
    seconds = {name: price(find(name, placement).allreduce, placement, network, 100e6) for name in ("ring", "direct")}
    assert seconds["ring"] == pytest.approx(2 * 11 / 12 * 100e6 * 8e-10, rel=0.01)
    assert seconds["direct"] == pytest.approx(0.427, rel=0.01)


@given(p=st.integers(2, 24), n=st.integers(0, 10**9))
def test_ring_and_direct(p: int, n: int) -> None:
    network = Network(ALPHA, BETA, GAMMA)
    bytes_and_sums = Fraction(p - 1, p) * n * (2 * BETA + GAMMA)
    assert price(ring, one_rank_per_node(p), network, Fraction(n)) == 2 * (p - 1) * ALPHA + bytes_and_sums
    assert price(direct, one_rank_per_node(p), network, Fraction(n)) == 2 * ALPHA + bytes_and_sums


def test_ranks_of_a_node_share_its_link() -> None:
    network = Network(ALPHA, BETA, GAMMA, within_alpha=ALPHA / 2, within_beta=BETA / 100)
    n = Fraction(840)
    pairs = regular(2, 2, 2)
    everyone_crosses = price(find("halving", pairs).allreduce, pairs, network, n)
    assert everyone_crosses > 2 * BETA * 2 * n / 2
    ring_crosses_once = price(find("ring", pairs).allreduce, pairs, network, n)
    assert ring_crosses_once == 14 * ALPHA + Fraction(7, 8) * n * (2 * BETA + GAMMA)


def test_ranks_of_one_node_use_no_link() -> None:
    network = Network(ALPHA, BETA, GAMMA, within_alpha=ALPHA / 2, within_beta=BETA / 100)
    within = Network(ALPHA / 2, BETA / 100, GAMMA)
    together = place(["a"] * 6)
    assert price(ring, together, network, Fraction(60)) == price(ring, one_rank_per_node(6), within, Fraction(60))


def test_lanes_run_side_by_side() -> None:
    stars = find("multicolor/8", one_rank_per_node(8)).allreduce
    network = Network(ALPHA, BETA, 0)
    n = Fraction(800)
    assert price(stars, one_rank_per_node(8), network, n) == 2 * ALPHA + 2 * Fraction(7, 8) * n * BETA


def test_only_some_programs_are_made() -> None:
    made = set()

    def counted(rank: int, ranks: int):
        made.add(rank)
        return direct(rank, ranks)

    price(counted, one_rank_per_node(600), DEFAULT, 1000, ranks=[0, 7])
    assert made == {0, 7}
    price(counted, one_rank_per_node(600), DEFAULT, 1000)
    assert len(made) == 256
    assert 599 in made


@pytest.mark.parametrize("ranks", [[], [4], [-1]])
def test_ranks_out_of_range_raise(ranks: list[int]) -> None:
    with pytest.raises(NetworkError, match="there are 4"):
        price(ring, one_rank_per_node(4), DEFAULT, 1, ranks)
