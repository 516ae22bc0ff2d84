from __future__ import annotations

from fractions import Fraction

import pytest

from unisono.errors import UsageError
from unisono.network import DEFAULT, EVEN, Network, NetworkError, Uneven, shaped
from unisono.placement import regular


def test_a_shaped_network_has_the_rates_it_was_given() -> None:
    network = shaped(10e9, hosts_per_supernode=256, oversubscription=4)
    assert network.beta == 8e-10
    assert network.crossing_beta(256) == pytest.approx(4 * 8e-10)
    assert network.crossing_beta(1) == network.beta, "one that crosses alone is held up by its own link"


def test_uplinks_without_a_limit() -> None:
    assert not DEFAULT.oversubscribed
    assert not shaped(10e9, 4).oversubscribed
    assert not Network(1, 1, uplink_beta=0).oversubscribed
    assert DEFAULT.crossing_beta(1000) == DEFAULT.beta


@pytest.mark.parametrize("values", [{"alpha": -1e-6}, {"gamma": float("nan")}, {"uplink_beta": float("inf")}])
def test_invalid_networks_raise(values: dict[str, float]) -> None:
    with pytest.raises(NetworkError, match=next(iter(values))) as error:
        Network(**({"alpha": Fraction(1), "beta": Fraction(1)} | values))
    assert isinstance(error.value, UsageError)


def test_links_need_positive_beta() -> None:
    with pytest.raises(NetworkError, match="beta is 0"):
        Network(1, 0)
    with pytest.raises(NetworkError, match=r"beta is 9\.99989e-321 seconds per byte; it must be 1e-30 or more"):
        Network(1, 1e-320)
    with pytest.raises(NetworkError, match="0 hosts"):
        shaped(10e9, 0)


def test_all_others_are_as_the_network() -> None:
    uneven = Uneven({1: 4}, {2: 0.005})
    assert uneven.factors(regular(1, 2, 2)) == [1, 4]
    assert uneven.starts(regular(1, 2, 2)) == [0, 0, 0.005, 0]
    assert EVEN.factors(regular(1, 2, 2)) == [1, 1]
    assert EVEN.starts(regular(1, 1, 2)) == [0, 0]


@pytest.mark.parametrize(
    ("nodes", "ranks", "message"),
    [
        ({0: 0.5}, {}, "node 0: its link is 0.5 times slower; give 1 or more"),
        ({0: float("nan")}, {}, "node 0"),
        ({}, {3: -1.0}, "rank 3 is -1 s late; give 0 or more"),
        ({}, {3: float("inf")}, "rank 3"),
    ],
)
def test_values_that_cannot_be(nodes: dict[int, float], ranks: dict[int, float], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        Uneven(nodes, ranks)


def test_nodes_and_ranks_that_do_not_exist() -> None:
    with pytest.raises(NetworkError, match="no node 2: nodes are 0 to 1"):
        Uneven({2: 2}).factors(regular(1, 2, 2))
    with pytest.raises(NetworkError, match="no rank 4: ranks are 0 to 3"):
        Uneven({}, {4: 1}).starts(regular(1, 2, 2))
