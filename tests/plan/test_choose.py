from __future__ import annotations

from collections.abc import Sequence
from functools import cache

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
    finer,
    in_equal_buckets,
    initial_setting,
    is_searched,
    layout_of,
    predicted,
    space_of,
)
from unisono.rules import BSP, EASGD, DiLoCo, Exchange, LocalSGD, Sharded
from unisono.step.costs import Computing, Cost, Costs, Prediction
from unisono.step.layout import Bucket
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import predict

MIB = 1 << 20

PARAMETERS = [MIB // 4, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB, 16 * MIB]
"""Bytes of eight layers that take equally long: small ones first, as in most networks, and a huge one near the end."""

NETWORK = Computing(tuple(i * 4e-3 for i in range(8)), tuple((32 + 8 * (8 - i)) * 1e-3 for i in range(8)), 96e-3)


def loads(size: int, end_ratio: int = 1) -> list[Bucket]:
    lengths = [(nbytes // 4, torch.float32) for nbytes in PARAMETERS]
    buckets = plan_memory(lengths, list(reversed(range(8))), size, (), end_ratio).buckets
    return [Bucket(bucket.nbytes, bucket.parameters) for bucket in buckets]


def ask(computing: Computing, buckets: Buckets, cost: Cost, deferred: bool = True) -> PredictionInputs:
    return PredictionInputs(BSP(), computing, buckets, cost, deferred, nodes=2)


def chained(sent: Sequence[Bucket], cost: Cost) -> Prediction:
    return predict(BSP(overlap="chain"), Costs(layout_of(NETWORK, sent, True), NETWORK, cost))


def at(ratio: float, latency: float = 5e-5) -> Cost:
    """What makes communication take so many times what computing takes."""
    return Cost(latency, ratio * NETWORK.whole / sum(PARAMETERS))


def summary(found: Sequence[Candidate]) -> list[tuple[str, int]]:
    return [(one.setting.overlap, one.setting.bucket_bytes // MIB) for one in found]


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
    found = choice(ratio)
    assert summary(found)[0] == best
    assert found[0].setting.end_ratio == end_ratio
    assert summary(found)[-1] == ("none", 128)
    assert found[0].prediction.step < most * NETWORK.whole
    assert found[0].prediction.step < 1.01 * bound(NETWORK, PARAMETERS, at(ratio))
    assert found[-1].prediction.step == pytest.approx((1 + ratio) * NETWORK.whole, rel=0.01)


@pytest.mark.parametrize(
    ("ratio", "order"),
    [
        (0.25, [("chain", 32), ("concurrent", 64), ("none", 128), ("funnel", 128)]),
        (1, [("chain", 64), ("concurrent", 64), ("none", 128), ("funnel", 128)]),
    ],
)
def test_the_choice_without_deferred_waiting(ratio: float, order: list[tuple[str, int]]) -> None:
    """A funnel holds up the only thread that computes, so it hides nothing: it is as good as none, which is simpler."""
    found = candidates(ask(NETWORK, loads, at(ratio), deferred=False))
    assert summary(found) == order
    assert all(one.setting.sequence == () for one in found)


def test_small_buckets_at_both_ends_of_large_ones_are_chosen_if_they_are_faster() -> None:
    """The exchange begins soon, and little is left of it at the end; those between have few latencies."""
    inputs = ask(NETWORK, loads, at(1, latency=2e-3))
    best = choice(1, 2e-3)[0]
    equal = [predicted(inputs, Setting("chain", size)) for size in BUCKET_SIZES]
    assert best.setting.end_ratio > 1
    assert best.prediction.step < 0.98 * min(one.prediction.step for one in equal)
    buckets = inputs.buckets(best.setting.bucket_bytes, best.setting.end_ratio)
    assert sorted(best.costs.layout.buckets) == sorted(buckets)
    middle = max(one.nbytes for one in buckets)
    assert max(buckets[0].nbytes, buckets[-1].nbytes) < middle / 2


def test_the_same_in_equal_buckets() -> None:
    inputs = ask(NETWORK, loads, at(1))
    best = choice()[0]
    equal = in_equal_buckets(best, inputs)
    assert best.setting.end_ratio > 1
    assert equal is not None
    assert (equal.setting.overlap, equal.setting.end_ratio) == ("chain", 1)
    steps = [predicted(inputs, Setting("chain", size)).prediction.step for size in BUCKET_SIZES]
    assert min(steps) <= equal.prediction.step <= min(steps) * BUCKETS_TIE_RATIO
    assert in_equal_buckets(equal, inputs) is None


def test_a_given_size_is_that_of_all_buckets() -> None:
    assert end_ratios("chain", BUCKET_SIZES, 2) == END_RATIOS
    assert end_ratios("chain", [MIB], 2) == (1,)
    assert {end_ratios(name, BUCKET_SIZES, 2) for name in OVERLAPS if name != "chain"} == {(1,)}


@pytest.mark.parametrize("ratio", [0.25, 1])
def test_buckets_of_one_node_are_equal(ratio: float) -> None:
    """No link is kept busy there, and the cores that compute pay for each further bucket."""
    inputs = ask(NETWORK, loads, at(ratio, latency=2e-3))
    assert choice(ratio, 2e-3)[0].setting.end_ratio > 1
    assert {one.setting.end_ratio for one in candidates(inputs._replace(nodes=1))} == {1}


def test_a_setting_is_predicted_again_with_other_inputs() -> None:
    found = choice()[0]
    assert predicted(ask(NETWORK, loads, at(1)), found.setting) == found
    assert predicted(ask(NETWORK, loads, at(0)), found.setting).prediction.step < found.prediction.step


def test_the_same_in_finer_buckets() -> None:
    best = choice()[0]
    small = finer(best, ask(NETWORK, loads, at(1)))
    assert small is not None
    assert small.setting.overlap == best.setting.overlap
    assert small.setting.bucket_bytes == best.setting.bucket_bytes // 4
    assert small.prediction.step >= best.prediction.step / TIE_RATIO
    assert finer(best, ask(NETWORK, loads, at(1)), sizes=[best.setting.bucket_bytes]) is None
    assert finer(best, ask(NETWORK, lambda *_: loads(MIB), at(1))) is None


def test_a_long_latency_wants_larger_buckets() -> None:
    short, long = (choice(1, latency)[0] for latency in (5e-5, 5e-4))
    assert long.setting.bucket_bytes > short.setting.bucket_bytes


def test_only_a_chain_with_a_deferred_wait_reorders_buckets() -> None:
    found = choice()
    order = {one.setting.overlap: one.setting.sequence for one in found}
    assert [name for name in order if order[name]] == ["chain"]
    chain = found[0]
    buckets = loads(chain.setting.bucket_bytes, chain.setting.end_ratio)
    assert sorted(order["chain"]) == list(range(len(buckets)))
    sent = [buckets[number] for number in order["chain"]]
    assert chained(sent, at(1)) == chain.prediction
    as_they_fill = chained(buckets, at(1))
    assert chain.prediction.step < 0.9 * as_they_fill.step


def test_a_sharded_rule_orders_halves_in_a_chain() -> None:
    """All weights gathered after all gradients leave the link idle while the first layers are computed."""
    inputs = ask(NETWORK, loads, at(1))._replace(rule=Sharded(), ranks=4)
    found = {one.setting.overlap: one for one in candidates(inputs)}
    assert [name for name, one in found.items() if one.setting.halves] == ["chain"]
    setting, prediction = found["chain"].setting, found["chain"].prediction
    buckets = loads(setting.bucket_bytes, setting.end_ratio)
    assert sorted(setting.halves) == sorted(2 * [*range(1, len(buckets) + 1)])
    assert tuple(dict.fromkeys(setting.halves)) == tuple(range(1, len(buckets) + 1))
    assert sorted(setting.sequence) == list(range(len(buckets)))
    assert prediction.step < 1.05 * choice()[0].prediction.step
    layout = layout_of(NETWORK, [buckets[number] for number in setting.sequence], True, 4)
    at_the_end = predict(Sharded(overlap="chain"), Costs(layout, NETWORK, at(1)))
    assert at_the_end.step > 1.05 * prediction.step


def test_only_given_options_are_considered() -> None:
    found = candidates(ask(NETWORK, loads, at(1)), ["concurrent"], [2 * MIB])
    assert summary(found) == [("concurrent", 2)]


@pytest.mark.parametrize("deferred", [True, False])
def test_none_is_chosen_when_nothing_can_be_hidden(deferred: bool) -> None:
    """One layer: its gradient comes when all is computed, and it is needed at once. All are equal, up to rounding."""
    found = candidates(ask(Computing((0.0,), (1.0,), 1.0), lambda *_: [Bucket(100, (0,))], Cost(0.0, 1e-3), deferred))
    assert [one.setting.overlap for one in found] == list(OVERLAPS_BY_SIMPLICITY)
    assert [one.prediction.step for one in found] == pytest.approx([1.1] * 4)


@pytest.mark.parametrize("deferred", [True, False])
def test_the_largest_buckets_and_the_simplest_overlap_are_chosen_when_exchange_costs_nothing(deferred: bool) -> None:
    found = candidates(ask(NETWORK, loads, Cost(0.0, 0.0), deferred))
    assert [one.setting[:2] for one in found] == [(name, max(BUCKET_SIZES)) for name in OVERLAPS_BY_SIMPLICITY]


def test_larger_buckets_are_preferred_when_they_are_about_as_good() -> None:
    """Two buckets of a gradient that comes late: the latency of the second is what they differ in."""
    one_layer = Computing((0.0,), (1.0,), 1.0)
    cut: dict[int, list[Bucket]] = {4: [Bucket(4, (0,))], 2: [Bucket(2, (0,))] * 2, 1: [Bucket(1, (0,))] * 4}
    for latency in (0.0, 1e-3):
        found = candidates(ask(one_layer, lambda size, _: cut[size], Cost(latency, 0.1)), ["chain"], [2, 4, 1])
        assert found[0].setting.bucket_bytes == 4


def test_smaller_buckets_are_chosen_when_they_are_clearly_better() -> None:
    """w1 hides but for what comes with w0."""
    two = Computing((0.0, 0.5), (2.0, 1.0), 2.0)
    parts = {8: [Bucket(8, (0, 1))], 4: [Bucket(4, (1,)), Bucket(4, (0,))]}
    found = candidates(ask(two, lambda size, _: parts[size], Cost(0.0, 0.1)), sizes=[4, 8])
    assert found[0].setting.bucket_bytes == 4
    assert found[0].prediction.step == pytest.approx(2.4)


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
    found = candidates(ask(computing, cut, cost, deferred), sizes=sizes)
    assert sorted(one.setting.overlap for one in found) == sorted(OVERLAPS)
    near = min(one.prediction.step for one in found) * TIE_RATIO
    first = found[0]
    assert first.prediction.step <= near
    simpler = OVERLAPS_BY_SIMPLICITY[: OVERLAPS_BY_SIMPLICITY.index(first.setting.overlap)]
    assert all(one.prediction.step > near for one in found if one.setting.overlap in simpler)
    beyond = [one.prediction.step for one in found if one.prediction.step > near]
    assert beyond == sorted(beyond) == [one.prediction.step for one in found[len(found) - len(beyond) :]]
    for one in found:
        inputs = ask(computing, cut, cost, deferred)
        every = [
            predicted(inputs, Setting(one.setting.overlap, size, outstanding=count, end_ratio=ratio))
            for size in sizes
            for count in OUTSTANDING
            for ratio in end_ratios(one.setting.overlap, sizes, 2)
        ]
        fastest = min(each.prediction.step for each in every)
        good = [each for each in every if each.prediction.step <= fastest * BUCKETS_TIE_RATIO]
        fewest = min(len(each.costs.layout.buckets) for each in good)
        largest = max(each.setting.bucket_bytes for each in good if len(each.costs.layout.buckets) == fewest)
        assert (len(one.costs.layout.buckets), one.setting.bucket_bytes) == (fewest, largest)


def test_a_rule_that_leaves_all_open_has_all_to_choose_from() -> None:
    assert space_of(BSP()) == (tuple(OVERLAPS), BUCKET_SIZES, OUTSTANDING)
    assert space_of(BSP(Exchange(bucket_bytes=5), "funnel", 3)) == (("funnel",), (5,), (3,))


def test_steps_of_a_period_are_not_searched() -> None:
    assert is_searched(BSP())
    assert is_searched(Sharded())
    assert not any(map(is_searched, (LocalSGD(every=2), EASGD())))


def test_the_initial_setting_has_as_many_buckets_as_the_rule_needs() -> None:
    assert initial_setting(BSP(), loads, 4) == Setting("chain", INITIAL_BUCKET_BYTES, (), OUTSTANDING[0])
    assert initial_setting(BSP(), loads, 1).overlap == "none"
    assert initial_setting(BSP(Exchange(bucket_bytes=5), "funnel", 3), loads, 4) == Setting("funnel", 5, (), 3)
    found = initial_setting(DiLoCo(every=128, fragments=50), loads, 4).bucket_bytes
    assert len(loads(found)) >= 50 > len(loads(2 * found))
