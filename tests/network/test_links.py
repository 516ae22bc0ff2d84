from fractions import Fraction

import pytest

from unisono.errors import UsageError
from unisono.network import DEFAULT, Network, NetworkError, shaped


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
    with pytest.raises(NetworkError, match="0 hosts"):
        shaped(10e9, 0)
