"""The closed forms against the price of the schedules, exactly."""

from fractions import Fraction

import pytest
from benchmarks.seeds.supernodes import rank_order_seconds, round_robin_seconds, weak_speedup

from unisono.network import Network, NetworkError, price
from unisono.placement import regular
from unisono.schedules import find

BETA = Fraction(1, 12 * 10**9)


@pytest.mark.parametrize(("nodes", "supernode"), [(2, 1), (4, 4), (8, 4), (16, 2), (64, 16), (256, 64)])
def test_the_price_of_halving(nodes: int, supernode: int) -> None:
    network = Network(Fraction(1, 10**6), BETA, Fraction(1, 10**10), 4 * BETA / supernode)
    placement, nbytes = regular(nodes // supernode, supernode, 1), Fraction(nodes * 12345)
    for name, closed in (("halving", rank_order_seconds), ("halving/round-robin", round_robin_seconds)):
        priced = price(find(name, placement).allreduce, placement, network, nbytes)
        assert closed(nodes, supernode, nbytes, network) == priced


def test_the_worked_example() -> None:
    network = Network(0, 1 / 12e9, 0, 4 / 12e9 / 256)
    assert rank_order_seconds(1024, 256, 232.6 * 2**20, network) == pytest.approx(0.132, abs=5e-4)
    assert round_robin_seconds(1024, 256, 232.6 * 2**20, network) == pytest.approx(0.041, abs=5e-4)


@pytest.mark.parametrize(
    ("nodes", "supernode", "message"),
    [(12, 4, "12 nodes: "), (16, 3, "3 nodes in a supernode"), (4, 8, "4 nodes cannot fill a supernode of 8")],
)
def test_other_numbers_are_refused(nodes: int, supernode: int, message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        round_robin_seconds(nodes, supernode, 1.0, Network(0, 1))


def test_shares_of_communication_give_swcaffes_speedups() -> None:
    """Figures 10 and 11, of 1,024 nodes; AlexNet with 256, 128, 64 samples a node, ResNet-50 with 32."""
    for share, speedup in ((0.3013, 715.45), (0.4515, 561.58), (0.6001, 409.50), (0.1911, 828.32)):
        assert weak_speedup(1024, 1 - share, share) == pytest.approx(speedup, rel=1e-3)
