"""The cheapest schedule is found without an estimate of all, also on more ranks than are examined one by one."""

from __future__ import annotations

import pytest

from unisono.choosing import priced
from unisono.choosing.priced import choose_by_price
from unisono.network import Amount, Network, estimate
from unisono.network.estimate import least_cost
from unisono.placement import Placement, one_rank_per_node, regular
from unisono.schedules import candidates, find
from unisono.schedules.schedule import Algorithm

FAST = Network(1e-6, 1e-10, 1e-11, 1e-12)
SLOW = Network(1e-4, 1e-8)
PLACEMENTS = [one_rank_per_node(2), one_rank_per_node(13), regular(2, 4, 1), regular(2, 3, 2), regular(2, 16, 1)]


@pytest.mark.parametrize("network", [FAST, SLOW])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda one: f"{len(one.nodes)} nodes, {one.ranks} ranks")
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 19, 1 << 24])
def test_it_is_the_first_of_the_cheapest(placement: Placement, network: Network, nbytes: int) -> None:
    def seconds(name: str) -> float:
        return float(estimate(find(name, placement).allreduce, placement, network, nbytes))

    other = "leader" if nbytes > priced.MAX_LEADER_BYTES * min(map(len, placement.nodes)) else "hierarchical"
    names = [name for name in candidates("allreduce", placement) if not name.startswith(other)]
    assert choose_by_price("allreduce", placement, network, nbytes).algorithm == min(names, key=seconds)


@pytest.mark.parametrize("name", ["ring", "halving", "tree", "multicolor", "pipeline", "direct", "hierarchical"])
@pytest.mark.parametrize("network", [FAST, SLOW])
@pytest.mark.parametrize("nbytes", [1024, 1 << 20, 1 << 26])
def test_no_estimate_is_below_the_least_cost(name: str, network: Network, nbytes: int) -> None:
    placement = regular(2, 4, 2 if name == "hierarchical" else 1)
    algorithm = find(name, placement).allreduce
    least = float(least_cost(algorithm, placement, network).seconds(nbytes))
    assert 0 < least <= float(estimate(algorithm, placement, network, nbytes)) * (1 + 1e-12)


def test_a_long_ring_is_estimated_by_a_few_of_its_ranks() -> None:
    """On 2,048 nodes a ring has 4,094 rounds, but halving sends all it has through uplinks of a tenth of the rate."""
    placement, narrow = regular(16, 128, 1), Network(1e-7, 1e-10, uplink_beta=1e-11)
    assert choose_by_price("allreduce", placement, narrow, 1 << 28).algorithm == "ring"


def test_long_rounds_are_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 300 nodes a ring's 598 messages take 60 ms, and halving far less."""
    made = list[Algorithm]()

    def record(algorithm: Algorithm, placement: Placement, network: Network, nbytes: int) -> Amount:
        made.append(algorithm)
        return estimate(algorithm, placement, network, nbytes)

    monkeypatch.setattr(priced, "estimate", record)
    placement = one_rank_per_node(300)
    assert choose_by_price("allreduce", placement, SLOW, 1 << 12).algorithm != "ring"
    assert 0 < len(made) < len(candidates("allreduce", placement))


def test_a_chain_of_many_ranks_is_no_candidate() -> None:
    assert "pipeline" in candidates("allreduce", one_rank_per_node(256))
    assert "pipeline" not in candidates("allreduce", one_rank_per_node(257))
    assert "pipeline" in candidates("broadcast", one_rank_per_node(257))
