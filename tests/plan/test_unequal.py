import pytest

from unisono.plan.machines import LinkFacts, MachineFacts
from unisono.plan.measured_rows import CollectiveRow
from unisono.plan.unequal import Unequal, cost_of, slowed, with_slow_links
from unisono.rules import BSP, BaseRule, LocalSGD
from unisono.step import operations as op
from unisono.step.clock import Clock
from unisono.step.costs import Computing, Cost, Costs, Duration
from unisono.step.layout import Bucket, Layout
from unisono.step.predict import predict
from unisono.step.program import Step, Task

TIMES = 3.0
COMPUTING = Computing((0.0, 1.0), (5.0, 4.0), 5.0, 1e-4)
LAYOUT = Layout(2, 2, (Bucket(4000, (1,)), Bucket(8000, (0,))), (1, 2), (0, 1))
COST = Cost(0.1, 1e-4)


def test_the_worked_example() -> None:
    assert cost_of(Unequal({3: 4.0}), 0.1, 0.071, 0.1) == (
        "node 3's link, 4 times slower: 29 ms of the step; without it 1.41 times as fast"
    )


def test_the_costliest_is_named() -> None:
    both = Unequal({3: 4.0, 5: 6.0}, {1: 1.5})
    assert cost_of(both, 1.0, 0.9, 0.95).startswith("node 5's link (the slowest of 2), 6 times slower: 100 ms")
    assert cost_of(both, 1.0, 0.9, 0.8).startswith("node 1's computing, 1.5 times slower: 200 ms")
    assert cost_of(both, 1.0, 0.999, 1.0) == ""
    assert cost_of(Unequal(), 1.0, 1.0, 1.0) == ""


def test_only_nodes_of_the_run_count() -> None:
    both = Unequal({3: 4.0, 5: 6.0}, {9: 1.5})
    assert both.among(5) == Unequal({3: 4.0})
    assert (both.slowest, both.among(5).slowest) == (1.5, 1.0)


def test_rows_over_a_link_that_the_file_does_not_call_slow_do_not_hold() -> None:
    rows = tuple(CollectiveRow("allreduce", "ring", "float32", nodes, 2 * nodes, 4, 1.0, 0.0) for nodes in (1, 2, 3, 4))
    probed = MachineFacts("example", link=LinkFacts(1e9), slow_links={3: 4.0}, collectives=rows)
    assert with_slow_links(probed, {}) == with_slow_links(probed, {3: 4.0}) == probed
    assert with_slow_links(probed, {9: 2.0}).slow_links == {3: 4.0, 9: 2.0}
    assert with_slow_links(probed, {9: 2.0}).collectives == rows
    for links, left in (({1: 2.0}, 1), ({2: 2.0, 3: 4.0}, 2), ({3: 5.0}, 3), ({0: 2.0}, 1)):
        assert with_slow_links(probed, links).collectives == rows[:left]
    mended = with_slow_links(probed, {3: 1.0})
    assert (mended.slow_links, mended.collectives) == ({}, rows[:3])


@pytest.mark.parametrize("rule", [BSP(overlap="chain"), BSP(overlap="none"), LocalSGD(every=2)])
def test_one_slow_node_is_as_slow_as_if_all_were(rule: BaseRule) -> None:
    """Two ranks on a clock, one of them slow, take the steps of a rank whose computing is slowed."""
    costs = [Costs(LAYOUT, slowed(COMPUTING, times), COST) for times in (1.0, TIMES)]
    steps = 8

    def price(rank: int, task: Task) -> Duration:
        return task.operation.price(task, costs[rank])

    programs = {
        rank: tuple(task for number in range(steps + 1) for task in rule(Step(number), rank, LAYOUT)) for rank in (0, 1)
    }
    spans = Clock(programs, rule.threads(), price).run()
    begins = sorted(span.begin for span in spans if span.rank == 1 and span.task.operation is op.BEGIN)
    assert (begins[steps] - begins[steps - 4]) / 4 == pytest.approx(predict(rule, costs[1]).step)
    assert predict(rule, costs[1]).step > predict(rule, costs[0]).step
