import pytest

from unisono.choosing.schedule_table import ScheduleTable
from unisono.network import Uneven, estimate, simulate
from unisono.plan import simulated_cost as module
from unisono.plan.collective_costs import CollectiveCase
from unisono.plan.exchange_cost import network_of, placement_of
from unisono.plan.machines import LinkFacts, MachineFacts
from unisono.plan.simulated_cost import charged, rounded, simulated_cost
from unisono.plan.simulated_schedule import simulate_schedule
from unisono.rules import BSP, Exchange, Sharded
from unisono.schedules import find
from unisono.step.costs import Cost

MACHINE = MachineFacts("example", link=LinkFacts(1e9, latency=1e-5))
SLOW = MachineFacts("example", link=LinkFacts(1e9, latency=1e-5), slow_links={1: 4.0, 9: 50.0})


def test_each_size_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def counted(case: CollectiveCase, name: str, nbytes: int, uneven: Uneven) -> object:
        sizes.append(nbytes)
        return original(case, name, nbytes, uneven)

    original = module.simulate_schedule
    monkeypatch.setattr(module, "simulate_schedule", counted)
    found = simulated_cost(MACHINE, 4, 1, None, [1 << 20, (1 << 20) - 64, 1 << 16])
    assert sizes == [1 << 16, 1 << 20]
    assert found.seconds[1 << 20] == found.seconds[(1 << 20) - 64] > found.seconds[1 << 16]
    assert found.refused == {}


def test_a_slow_link_of_the_run_slows_it() -> None:
    seconds = [simulated_cost(one, 4, 1, None, [1 << 20]).seconds[1 << 20] for one in (MACHINE, SLOW)]
    placement, network = placement_of(MACHINE, 4, 1), network_of(MACHINE, 1)
    direct = find("direct", placement).allreduce
    expected = [simulate(direct, placement, network, 1 << 20, uneven=Uneven(slow)).seconds for slow in ({}, {1: 4.0})]
    assert seconds == pytest.approx(expected)


def test_a_schedule_that_cannot_be_simulated_is_estimated() -> None:
    found = simulated_cost(MACHINE, 4096, 1, None, [4])
    assert list(found.refused) == ["multicolor"]
    placement, network = placement_of(MACHINE, 4096, 1), network_of(MACHINE, 1)
    assert found.seconds[4] == float(estimate(find("multicolor", placement).allreduce, placement, network, 4))


@pytest.mark.parametrize("nbytes", [1, 511, 512, 1001, 102_760_512, (1 << 27) - 1])
def test_sizes_are_rounded_up_a_little(nbytes: int) -> None:
    assert nbytes <= rounded(nbytes) <= nbytes * 1.004
    assert rounded(rounded(nbytes)) == rounded(nbytes)


def test_a_sharded_rule_has_a_latency_for_each_collective_and_gathers_whole_weights() -> None:
    """Two of its three collectives move the bucket, with the latency of an allreduce, 0.1, together."""
    cost, took = Cost(0.15, 1e-3), {1000: 1.1}
    assert charged(BSP(), cost, took) == took
    assert charged(Sharded(), cost, took) == {1000: pytest.approx(0.15 + 1.0)}
    assert charged(Sharded(exchange=Exchange(wire="bfloat16")), cost, took) == {1000: pytest.approx(0.15 + 1.5)}


@pytest.mark.parametrize(("algorithm", "expected"), [("ring", "ring"), ("auto", "direct"), ("library", "direct")])
def test_the_schedule_is_that_of_the_rule(algorithm: str, expected: str) -> None:
    case = CollectiveCase("allreduce", placement_of(MACHINE, 4, 1), ScheduleTable({}, network_of(MACHINE, 1)))
    seconds = {name: simulate_schedule(case, name, 1 << 20).seconds for name in ("ring", "direct")}
    assert simulated_cost(MACHINE, 4, 1, None, [1 << 20], algorithm).seconds == {1 << 20: seconds[expected]}
    assert seconds["ring"] != seconds["direct"]
