from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations

import pytest
import torch
from benchmarks.overlaps.bound import bound
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unisono.plan.bucket_layout import plan_memory
from unisono.plan.choose import (
    BUCKET_SIZES,
    BUCKETS_TIE_RATIO,
    END_RATIOS,
    INITIAL_BUCKET_BYTES,
    OUTSTANDING,
    OVERLAPS_BY_SIMPLICITY,
    TIE_RATIO,
    Buckets,
    Candidate,
    PredictionInputs,
    Setting,
    candidates,
    end_ratios,
    initial_setting,
    is_searched,
    overlaps_of,
    predicted,
    sequence,
    sizes_of,
    variants,
    with_buckets,
)
from unisono.rules import BSP, EASGD, DiLoCo, Exchange, LocalSGD, Sharded
from unisono.step.costs import Computing, Cost, Costs, Prediction
from unisono.step.layout import Bucket, Layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import predict

SEARCHED = [name for name in OVERLAPS_BY_SIMPLICITY if name != "phases"]

MIB = 1 << 20

PARAMETERS = [MIB // 4, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB, 16 * MIB]
"""Bytes of eight layers that take equally long: small ones first, as in most networks, and a huge one near the end."""

NETWORK = Computing(tuple(i * 4e-3 for i in range(8)), tuple((32 + 8 * (8 - i)) * 1e-3 for i in range(8)), 96e-3)


def loads(size: int, end_ratio: int = 1) -> list[Bucket]:
    lengths = [(nbytes // 4, torch.float32) for nbytes in PARAMETERS]
    buckets = plan_memory(lengths, list(reversed(range(8))), size, (), end_ratio).buckets
    return [Bucket(bucket.nbytes, bucket.parameters) for bucket in buckets]


def ask(computing: Computing, buckets: Buckets, cost: Cost, deferred: bool = True) -> PredictionInputs:
    layout = Layout(4, len(computing.needed), (), deferred=deferred, nodes=((0, 1), (2, 3)))
    return PredictionInputs(BSP(), Costs(layout, computing, cost), buckets, nodes=2)


def chained(sent: Sequence[Bucket], cost: Cost) -> Prediction:
    layout = with_buckets(Layout(2, 8, ()), NETWORK, sent)
    return predict(BSP(overlap="chain"), Costs(layout, NETWORK, cost))


def at(ratio: float, latency: float = 5e-5) -> Cost:
    """What makes communication take so many times what computing takes."""
    return Cost(latency, ratio * NETWORK.whole / sum(PARAMETERS))


def summary(ranked: Sequence[Candidate]) -> list[tuple[str, int]]:
    return [(candidate.setting.overlap, candidate.setting.bucket_bytes // MIB) for candidate in ranked]


@cache
def choice(ratio: float = 1, latency: float = 5e-5) -> Sequence[Candidate]:
    """Return the candidates for the network on two nodes: each search takes a second."""
    return candidates(ask(NETWORK, loads, at(ratio, latency)))


@pytest.mark.parametrize(
    ("ratio", "best", "end_ratio", "most"),
    [
        (0.25, ("chain", 32), 16, 1.01),
        (0.5, ("chain", 32), 16, 1.01),
        (1, ("chain", 8), 4, 1.14),
        (2, ("chain", 128), 16, 2.14),
    ],
)
def test_the_choice_for_a_network(ratio: float, best: tuple[str, int], end_ratio: int, most: float) -> None:
    """All hides while communication takes half of what computing takes, and even at 1 but for what w6 sticks out."""
    ranked = choice(ratio)
    assert summary(ranked)[0] == best
    assert ranked[0].setting.end_ratio == end_ratio
    assert summary(ranked)[-1] == ("none", 128)
    assert ranked[0].prediction.step < most * NETWORK.whole
    assert ranked[0].prediction.step < 1.01 * bound(NETWORK, PARAMETERS, at(ratio))
    assert ranked[-1].prediction.step == pytest.approx((1 + ratio) * NETWORK.whole, rel=0.01)


@pytest.mark.parametrize(
    ("ratio", "order"),
    [
        (0.25, [("chain", 32), ("concurrent", 64), ("none", 128), ("funnel", 128)]),
        (1, [("chain", 64), ("concurrent", 64), ("none", 128), ("funnel", 128)]),
    ],
)
def test_the_choice_without_deferred_waiting(ratio: float, order: list[tuple[str, int]]) -> None:
    """A funnel holds up the only thread that computes, so it hides nothing: it is as good as none, which is simpler."""
    ranked = candidates(ask(NETWORK, loads, at(ratio), deferred=False))
    assert summary(ranked) == order
    assert all(candidate.setting.sequence == () for candidate in ranked)


def test_small_buckets_at_both_ends_of_large_ones_are_chosen_if_they_are_faster() -> None:
    """The exchange begins soon, and little is left of it at the end; those between have few latencies."""
    inputs = ask(NETWORK, loads, at(1, latency=2e-3))
    best = choice(1, 2e-3)[0]
    equal = [predicted(inputs, Setting("chain", size)) for size in BUCKET_SIZES]
    assert best.setting.end_ratio > 1
    assert best.prediction.step < 0.98 * min(candidate.prediction.step for candidate in equal)
    buckets = inputs.buckets(best.setting.bucket_bytes, best.setting.end_ratio)
    assert sorted(best.costs.layout.buckets) == sorted(buckets)
    middle = max(bucket.nbytes for bucket in buckets)
    assert max(buckets[0].nbytes, buckets[-1].nbytes) < middle / 2


def test_the_same_in_equal_buckets() -> None:
    inputs = ask(NETWORK, loads, at(1))
    best = choice()[0]
    *_, equal = variants(best, inputs)
    assert best.setting.end_ratio > 1
    assert (equal.setting.overlap, equal.setting.end_ratio) == ("chain", 1)
    steps = [predicted(inputs, Setting("chain", size)).prediction.step for size in BUCKET_SIZES]
    assert min(steps) <= equal.prediction.step <= min(steps) * BUCKETS_TIE_RATIO
    assert all(variant.setting.bucket_bytes != equal.setting.bucket_bytes for variant in variants(equal, inputs))


def test_a_given_size_is_that_of_all_buckets() -> None:
    assert end_ratios("chain", BUCKET_SIZES, 2) == end_ratios("phases", BUCKET_SIZES, 2) == END_RATIOS
    assert end_ratios("chain", [MIB], 2) == (1,)
    assert {end_ratios(name, BUCKET_SIZES, 2) for name in ("none", "funnel", "concurrent")} == {(1,)}


@pytest.mark.parametrize("ratio", [0.25, 1])
def test_buckets_of_one_node_are_equal(ratio: float) -> None:
    """No link is kept busy there, and the cores that compute pay for each further bucket."""
    inputs = ask(NETWORK, loads, at(ratio, latency=2e-3))
    assert choice(ratio, 2e-3)[0].setting.end_ratio > 1
    assert {candidate.setting.end_ratio for candidate in candidates(inputs._replace(nodes=1))} == {1}


def test_a_setting_is_predicted_again_with_other_inputs() -> None:
    best = choice()[0]
    assert predicted(ask(NETWORK, loads, at(1)), best.setting) == best
    assert predicted(ask(NETWORK, loads, at(0)), best.setting).prediction.step < best.prediction.step


def test_the_same_in_finer_and_coarser_buckets() -> None:
    best, inputs = choice()[0], ask(NETWORK, loads, at(1))
    finer, coarser, _ = variants(best, inputs)
    for other, size in ((finer, best.setting.bucket_bytes // 4), (coarser, best.setting.bucket_bytes * 4)):
        assert other.setting.overlap == best.setting.overlap
        assert other.setting.bucket_bytes == size
        assert other.prediction.step >= best.prediction.step / TIE_RATIO
    given = BSP(Exchange(bucket_bytes=best.setting.bucket_bytes))
    equal = predicted(inputs, best.setting._replace(end_ratio=1))
    assert [*variants(equal, inputs._replace(rule=given))] == []
    assert [*variants(equal, ask(NETWORK, lambda *_: loads(MIB), at(1)))] == []


def test_a_long_latency_wants_larger_buckets() -> None:
    short, long = (choice(1, latency)[0] for latency in (5e-5, 5e-4))
    assert long.setting.bucket_bytes > short.setting.bucket_bytes


def test_only_a_chain_with_a_deferred_wait_reorders_buckets() -> None:
    ranked = choice()
    order = {candidate.setting.overlap: candidate.setting.sequence for candidate in ranked}
    assert [name for name in order if order[name]] == ["chain"]
    chain = ranked[0]
    buckets = loads(chain.setting.bucket_bytes, chain.setting.end_ratio)
    assert sorted(order["chain"]) == list(range(len(buckets)))
    sent = [buckets[index] for index in order["chain"]]
    assert chained(sent, at(1)) == chain.prediction
    as_they_fill = chained(buckets, at(1))
    assert chain.prediction.step < 0.9 * as_they_fill.step


def test_a_sharded_rule_orders_halves_in_a_chain() -> None:
    """All weights gathered after all gradients leave the link idle while the first layers are computed."""
    inputs = ask(NETWORK, loads, at(1))._replace(rule=Sharded())
    by_overlap = {candidate.setting.overlap: candidate for candidate in candidates(inputs)}
    assert [name for name, candidate in by_overlap.items() if candidate.setting.halves] == ["chain"]
    setting, prediction = by_overlap["chain"].setting, by_overlap["chain"].prediction
    buckets = loads(setting.bucket_bytes, setting.end_ratio)
    assert sorted(setting.halves) == sorted(2 * [*range(1, len(buckets) + 1)])
    assert tuple(dict.fromkeys(setting.halves)) == tuple(range(1, len(buckets) + 1))
    assert sorted(setting.sequence) == list(range(len(buckets)))
    assert prediction.step < 1.05 * choice()[0].prediction.step
    layout = with_buckets(Layout(4, 8, ()), NETWORK, [buckets[index] for index in setting.sequence])
    at_the_end = predict(Sharded(overlap="chain"), Costs(layout, NETWORK, at(1)))
    assert at_the_end.step > 1.05 * prediction.step


def test_only_given_options_are_considered() -> None:
    rule = BSP(Exchange(bucket_bytes=2 * MIB), "concurrent", 3)
    ranked = candidates(ask(NETWORK, loads, at(1))._replace(rule=rule))
    assert summary(ranked) == [("concurrent", 2)]
    assert ranked[0].setting.outstanding == 3


@pytest.mark.parametrize("deferred", [True, False])
def test_none_is_chosen_when_nothing_can_be_hidden(deferred: bool) -> None:
    """One layer: its gradient comes when all is computed, and it is needed at once. All are equal, up to rounding."""
    ranked = candidates(ask(Computing((0.0,), (1.0,), 1.0), lambda *_: [Bucket(100, (0,))], Cost(0.0, 1e-3), deferred))
    assert [candidate.setting.overlap for candidate in ranked] == SEARCHED
    assert [candidate.prediction.step for candidate in ranked] == pytest.approx([1.1] * 4)


@pytest.mark.parametrize("deferred", [True, False])
def test_the_largest_buckets_and_the_simplest_overlap_are_chosen_when_exchange_costs_nothing(deferred: bool) -> None:
    ranked = candidates(ask(NETWORK, loads, Cost(0.0, 0.0), deferred))
    assert [candidate.setting[:2] for candidate in ranked] == [(name, max(BUCKET_SIZES)) for name in SEARCHED]


def test_larger_buckets_are_preferred_when_they_are_about_as_good() -> None:
    """Two buckets of a gradient that comes late: the latency of the second is what they differ in."""
    one_layer = Computing((0.0,), (1.0,), 1.0)
    cut: dict[int, list[Bucket]] = {4: [Bucket(4, (0,))], 2: [Bucket(2, (0,))] * 2, 1: [Bucket(1, (0,))] * 4}
    for latency in (0.0, 1e-3):
        inputs = ask(one_layer, lambda size, _: cut[size], Cost(latency, 0.1))
        ranked = candidates(inputs._replace(rule=BSP(overlap="chain")), [2, 4, 1])
        assert ranked[0].setting.bucket_bytes == 4


def test_smaller_buckets_are_chosen_when_they_are_clearly_better() -> None:
    """w1 hides but for what comes with w0."""
    two = Computing((0.0, 0.5), (2.0, 1.0), 2.0)
    parts = {8: [Bucket(8, (0, 1))], 4: [Bucket(4, (1,)), Bucket(4, (0,))]}
    ranked = candidates(ask(two, lambda size, _: parts[size], Cost(0.0, 0.1)), sizes=[4, 8])
    assert ranked[0].setting.bucket_bytes == 4
    assert ranked[0].prediction.step == pytest.approx(2.4)


@settings(max_examples=20)
@example([(1, 2, 35084), (5, 9, 16), (9, 9, 93040), (1, 1, 1), (2, 9, 37995)], 0.5, 1e-4, False)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 1 << 20)), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 1e-6, 1e-5, 1e-4]),
    st.booleans(),
)
def test_the_first_is_about_the_fastest_and_no_simpler_one_is(
    layers: list[tuple[int, int, int]], latency: float, per_byte: float, deferred: bool
) -> None:
    forward, backward, lengths = zip(*layers, strict=True)
    count, cost = len(layers), Cost(latency, per_byte)
    needed = tuple(float(sum(forward[:i])) for i in range(count))
    ready = tuple(float(sum(forward) + sum(backward[i:])) for i in range(count))
    computing = Computing(needed, ready, float(sum(forward) + sum(backward)))

    def cut(size: int, end_ratio: int) -> list[Bucket]:
        parameters = [(length, torch.float32) for length in lengths]
        buckets = plan_memory(parameters, list(reversed(range(count))), size, (), end_ratio).buckets
        return [Bucket(bucket.nbytes, bucket.parameters) for bucket in buckets]

    sizes = BUCKET_SIZES[::3]
    ranked = candidates(ask(computing, cut, cost, deferred), sizes=sizes)
    assert sorted(candidate.setting.overlap for candidate in ranked) == sorted(SEARCHED)
    near = min(candidate.prediction.step for candidate in ranked) * TIE_RATIO
    first = ranked[0]
    assert first.prediction.step <= near
    simpler = SEARCHED[: SEARCHED.index(first.setting.overlap)]
    assert all(candidate.prediction.step > near for candidate in ranked if candidate.setting.overlap in simpler)
    beyond = [candidate.prediction.step for candidate in ranked if candidate.prediction.step > near]
    assert beyond == sorted(beyond) == [candidate.prediction.step for candidate in ranked[len(ranked) - len(beyond) :]]
    for candidate in ranked:
        inputs = ask(computing, cut, cost, deferred)
        every = [
            predicted(inputs, Setting(candidate.setting.overlap, size, outstanding=count, end_ratio=ratio))
            for size in sizes
            for count in OUTSTANDING
            for ratio in end_ratios(candidate.setting.overlap, sizes, 2)
        ]
        fastest = min(each.prediction.step for each in every)
        good = [each for each in every if each.prediction.step <= fastest * BUCKETS_TIE_RATIO]
        fewest = min(len(each.costs.layout.buckets) for each in good)
        largest = max(each.setting.bucket_bytes for each in good if len(each.costs.layout.buckets) == fewest)
        assert (len(candidate.costs.layout.buckets), candidate.setting.bucket_bytes) == (fewest, largest)


def test_a_rule_that_leaves_all_open_has_all_to_choose_from() -> None:
    assert (sorted(overlaps_of(BSP())), sizes_of(BSP())) == (sorted(SEARCHED), BUCKET_SIZES)
    given = BSP(Exchange(bucket_bytes=5), "funnel", 3)
    assert (overlaps_of(given), sizes_of(given)) == (("funnel",), (5,))


def test_phases_are_not_searched() -> None:
    """They gained nothing where they were measured, and take communicators for good."""
    assert overlaps_of(BSP(overlap="phases")) == ("phases",)
    assert "phases" not in overlaps_of(BSP())


def test_phases_are_predicted_as_chain() -> None:
    """Only a trial tells what the phases within nodes take."""
    chain, inputs = choice()[0], ask(NETWORK, loads, at(1))
    phases = predicted(inputs, chain.setting._replace(overlap="phases"))
    assert chain.setting.overlap == "chain"
    assert phases.prediction == chain.prediction
    assert phases.costs.layout.nodes == ((0, 1), (2, 3))


def test_steps_of_a_period_are_not_searched() -> None:
    assert is_searched(BSP())
    assert is_searched(Sharded())
    assert not any(map(is_searched, (LocalSGD(every=2), EASGD())))


def test_the_initial_setting_has_as_many_buckets_as_the_rule_needs() -> None:
    assert initial_setting(BSP(), loads, 4) == Setting("chain", INITIAL_BUCKET_BYTES, (), OUTSTANDING[0])
    assert initial_setting(BSP(), loads, 1).overlap == "none"
    assert initial_setting(BSP(Exchange(bucket_bytes=5), "funnel", 3), loads, 4) == Setting("funnel", 5, (), 3)
    bucket_bytes = initial_setting(DiLoCo(every=128, fragments=50), loads, 4).bucket_bytes
    assert len(loads(bucket_bytes)) >= 50 > len(loads(2 * bucket_bytes))


BYTES = Cost(0.0, 1.0)
"""A second for a byte."""


def step_of(
    computing: Computing, sent: Sequence[Bucket], cost: Cost, overlap: str = "chain", deferred: bool = True
) -> float:
    layout = with_buckets(Layout(2, len(computing.needed), (), deferred=deferred), computing, sent)
    return predict(BSP(overlap=overlap), Costs(layout, computing, cost)).step


@st.composite
def computings(draw: st.DrawFn) -> Computing:
    """Whole seconds, so that sums are exact: parameters needed in any order, gradients ready in any other."""
    count, forward = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    needed = draw(st.lists(st.integers(0, forward), min_size=count, max_size=count))
    ready = draw(st.lists(st.integers(forward, forward + 18), min_size=count, max_size=count))
    total = max(ready) + draw(st.integers(0, 2))
    return Computing(tuple(map(float, needed)), tuple(map(float, ready)), float(total))


@st.composite
def networks(draw: st.DrawFn, largest: int = 12) -> tuple[Computing, list[int]]:
    """What is computed, and the bytes of each parameter."""
    computing = draw(computings())
    count = len(computing.needed)
    return computing, draw(st.lists(st.integers(0, largest), min_size=count, max_size=count))


def filled(computing: Computing, sizes: Sequence[int], largest: int) -> list[Bucket]:
    """Buckets of at most so many bytes as they fill; larger parameters are cut."""
    loads: list[Bucket] = []
    for parameter in sorted(range(len(sizes)), key=lambda parameter: computing.ready[parameter]):
        left = sizes[parameter]
        while left > 0:
            if not loads or loads[-1].nbytes >= largest:
                loads.append(Bucket(0, ()))
            part = min(left, largest - loads[-1].nbytes)
            loads[-1] = Bucket(loads[-1].nbytes + part, (*loads[-1].parameters, parameter))
            left -= part
    return loads


def test_the_bucket_needed_first_passes_large_ones() -> None:
    """The picture: conv1, conv2, fc6, fc7, fc8 are parameters 0 to 4, and fc6 is cut into four."""
    computing = Computing(needed=(0, 2, 4, 5, 6), ready=(17, 15, 12, 11, 10), whole=17)
    names = ["fc8", "fc7", "fc6a", "fc6b", "fc6c", "fc6d", "conv2", "conv1"]
    loads = [Bucket(1, (4,)), Bucket(1, (3,)), *[Bucket(2, (2,))] * 4, Bucket(1, (1,)), Bucket(1, (0,))]
    order = sequence(computing, loads, BYTES)
    assert [names[index] for index in order] == ["fc8", "fc7", "fc6a", "fc6b", "conv2", "conv1", "fc6c", "fc6d"]


def test_four_layers() -> None:
    """The last goes while nothing else is there; of those that come meanwhile the first layer goes first."""
    computing = Computing(needed=(0, 1, 2, 3), ready=(8, 7, 6, 5), whole=8)
    loads = [Bucket(4, (3,)), Bucket(4, (2,)), Bucket(4, (1,)), Bucket(4, (0,))]
    assert sequence(computing, loads, BYTES) == (0, 3, 2, 1)
    assert sequence(computing, loads, Cost(0.0, 0.25)) == (0, 1, 2, 3)
    assert sequence(computing, loads, Cost(1.0, 0.0)) == (0, 1, 2, 3)
    assert sequence(computing, loads, Cost(2.0, 0.0)) == (0, 2, 3, 1)


def test_a_bucket_is_ready_with_its_last_gradient_and_due_with_its_first_parameter() -> None:
    computing = Computing(needed=(0, 1, 2, 3), ready=(8, 7, 6, 5), whole=8)
    loads = [Bucket(1, (3, 1)), Bucket(5, (2,)), Bucket(1, (0,))]
    assert sequence(computing, loads, BYTES) == (1, 2, 0)


@given(networks(), st.integers(1, 20), st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([0.0, 0.25, 1.0, 2.0]))
def test_the_ready_bucket_that_is_needed_first_is_next(
    network: tuple[Computing, list[int]], largest: int, latency: float, per_byte: float
) -> None:
    computing, cost = network[0], Cost(latency, per_byte)
    loads = filled(*network, largest)
    order = sequence(computing, loads, cost)
    assert sorted(order) == list(range(len(loads)))
    there = [max(computing.ready[parameter] for parameter in load.parameters) for load in loads]
    due = [min(computing.needed[parameter] for parameter in load.parameters) for load in loads]
    now, left = 0.0, set(order)
    for index in order:
        now = max(now, min(there[pending] for pending in left))
        assert there[index] <= now
        assert due[index] == min(due[pending] for pending in left if there[pending] <= now)
        left.remove(index)
        now += cost.seconds(loads[index].nbytes)


def test_all_gathers_go_where_the_link_would_be_idle() -> None:
    """The picture of halves: fc8, fc7 and two parts of fc6, then the link is free until conv2's gradient comes."""
    computing = Computing(needed=(0, 2, 4, 5, 6), ready=(20, 17, 9, 9, 9), whole=20)
    names = ["8", "7", "6a", "6b", "2", "1"]
    loads = [Bucket(2, (4,)), Bucket(2, (3,)), Bucket(2, (2,)), Bucket(2, (2,)), Bucket(2, (1,)), Bucket(2, (0,))]
    seen, halves = set[int](), list[str]()
    for index in sequence(computing, loads, BYTES, 0.25):
        halves.append(("g" if index in seen else "r") + names[index])
        seen.add(index)
    assert " ".join(halves) == "r6a r6b g6a g6b r7 g7 r8 g8 r2 g2 r1 g1"


@given(networks(), st.integers(1, 20), st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([0.0, 0.25, 1.0]))
def test_the_half_that_is_ready_and_needed_first_is_next(
    network: tuple[Computing, list[int]], largest: int, latency: float, update: float
) -> None:
    """The link waits only for an all-gather that is more urgent, and comes while another half would be under way."""
    computing, cost = replace(network[0], update=update), Cost(latency, 1.0)
    loads = filled(*network, largest)
    order = sequence(computing, loads, cost, 0.5)
    assert sorted(order) == sorted(2 * [*range(len(loads))])
    there = {
        (index, 0): max(computing.ready[parameter] for parameter in load.parameters) for index, load in enumerate(loads)
    }
    due = [min(computing.needed[parameter] for parameter in load.parameters) for load in loads]
    now = 0.0
    for index in order:
        now = max(now, min(there.values()))
        while True:
            _, _, first = min((due[pending], turn, pending) for (pending, turn), ready in there.items() if ready <= now)
            ends = now + cost.seconds(loads[first].nbytes) / 2
            gathers = [(due[pending], ready) for (pending, turn), ready in there.items() if turn == 1]
            urgent = [ready for needed, ready in gathers if needed < due[first] and now < ready < ends]
            if not urgent:
                break
            now = min(urgent)
        half = 0 if (index, 0) in there else 1
        assert there[index, half] <= now
        assert due[index] == due[first]
        del there[index, half]
        now += cost.seconds(loads[index].nbytes) / 2
        if not half:
            there[index, 1] = now + 0.5 * update * loads[index].nbytes


def test_the_link_waits_for_an_update_of_a_first_layer() -> None:
    """Its all-gather follows at once; the one of a large last layer, which is there already, would be in its way."""
    computing = Computing(needed=(0, 2), ready=(6, 1), whole=6, update=0.1)
    loads = [Bucket(8, (1,)), Bucket(2, (0,))]
    assert sequence(computing, loads, BYTES, 0.5) == (0, 0, 1, 1)
    loads = [Bucket(8, (1,)), Bucket(4, (1,)), Bucket(2, (0,))]
    assert sequence(computing, loads, BYTES, 0.5) == (0, 1, 2, 2, 0, 1)


def test_the_exchange_of_the_first_layer_is_never_hidden() -> None:
    """Its gradient comes when all is computed, and it is needed at once."""
    assert bound(Computing((0, 4), (12, 8), 12), [3, 0], BYTES) == 15
    assert bound(Computing((0, 4), (12, 8), 12), [0, 3], BYTES) == 12


def test_the_bound_interrupts_large_exchanges_for_urgent_ones() -> None:
    """w2 8-10, w1 10-11, w2 11-12, w0 12-13, w2 13-22: needed 4 into the next step, it comes 6 too late."""
    computing = Computing(needed=(0, 2, 4), ready=(12, 10, 8), whole=12)
    assert bound(computing, [1, 1, 12], BYTES) == 18
    assert bound(computing, [1, 1, 12], Cost(5.0, 1.0)) == 18
    assert bound(computing, [1, 1, 12], Cost(0.0, 0.5)) == 12.5


def test_the_bound_waits_for_gradients() -> None:
    """w2 4-5, w1 6-8, w0 12-16."""
    assert bound(Computing((0, 1, 2), (12, 6, 4), 12), [4, 2, 1], BYTES) == 16


def test_nothing_to_exchange() -> None:
    assert bound(Computing((), (), 3), [], BYTES) == 3
    assert bound(Computing((0, 1), (3, 2), 3), [0, 0], BYTES) == 3


@settings(deadline=None)
@given(
    networks(), st.integers(1, 20), st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([0.0, 0.25, 1.0, 2.0]), st.data()
)
def test_no_step_is_predicted_to_be_below_the_bound(
    network: tuple[Computing, list[int]], largest: int, latency: float, per_byte: float, data: st.DataObject
) -> None:
    computing, sizes = network
    cost, loads = Cost(latency, per_byte), filled(*network, largest)
    least = bound(computing, sizes, cost)
    for overlap in OVERLAPS:
        for deferred in (True, False):
            assert step_of(computing, loads, cost, overlap, deferred) >= least
    for order in (sequence(computing, loads, cost), data.draw(st.permutations(range(len(loads))))):
        sent = [loads[index] for index in order]
        assert step_of(computing, sent, cost) >= least


@given(networks(), st.sampled_from([0.0, 0.25, 1.0, 2.0]))
def test_the_bound_is_no_less_than_computing_and_no_less_than_exchanging(
    network: tuple[Computing, list[int]], per_byte: float
) -> None:
    computing, sizes = network
    least = bound(computing, sizes, Cost(0.0, per_byte))
    assert least >= computing.whole
    assert least >= sum(sizes) * per_byte
    assert least <= max(computing.ready) + sum(sizes) * per_byte + computing.whole - min(computing.ready)


@settings(deadline=None)
@given(networks())
def test_buckets_of_one_byte_reach_the_bound(network: tuple[Computing, list[int]]) -> None:
    """Gradients come at whole seconds, and a byte takes one: cut so, nothing that is urgent ever waits."""
    computing, sizes = network
    loads = filled(computing, sizes, 1)
    sent = [loads[index] for index in sequence(computing, loads, BYTES)]
    reached = step_of(computing, sent, BYTES)
    assert reached == bound(computing, sizes, BYTES)


@settings(deadline=None, max_examples=60)
@given(computings(), st.lists(st.integers(0, 4), max_size=6))
def test_the_bound_is_the_best_of_all_orders_of_all_pieces(computing: Computing, pieces: list[int]) -> None:
    pieces = [piece % len(computing.needed) for piece in pieces]

    def step(order: Sequence[int]) -> float:
        now, late = 0.0, 0.0
        for parameter in order:
            now = max(now, computing.ready[parameter]) + 1
            late = max(late, now - computing.needed[parameter] - computing.whole)
        return computing.whole + late

    best = min(step(order) for order in set(permutations(pieces)))
    assert bound(computing, [pieces.count(parameter) for parameter in range(len(computing.needed))], BYTES) == best


@pytest.mark.parametrize("per_byte", [1e-9, 0.1, 1 / 3])
def test_the_bound_terminates_with_inexact_seconds(per_byte: float) -> None:
    computing = Computing(tuple(i / 7 for i in range(50)), tuple(10 + (50 - i) / 3 for i in range(50)), 10 + 50 / 3)
    least = bound(computing, [1000 + i for i in range(50)], Cost(0.0, per_byte))
    assert least >= max(computing.whole, sum(1000 + i for i in range(50)) * per_byte)
