from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from benchmarks.overlaps.bound import bound
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.choose import layout_of, sequence, sequence_of_halves
from unisono.rules import BSP
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Bucket
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import predict

BYTES = Cost(0.0, 1.0)
"""A second for a byte."""


def step_of(
    computing: Computing, sent: Sequence[Bucket], cost: Cost, overlap: str = "chain", deferred: bool = True
) -> float:
    return predict(BSP(overlap=overlap), Costs(layout_of(computing, sent, deferred), computing, cost)).step


@st.composite
def computings(draw: st.DrawFn) -> Computing:
    """Whole seconds, so that sums are exact: parameters needed in any order, gradients ready in any other."""
    count, forward = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    needed = draw(st.lists(st.integers(0, forward), min_size=count, max_size=count))
    ready = draw(st.lists(st.integers(forward, forward + 18), min_size=count, max_size=count))
    whole = max(ready) + draw(st.integers(0, 2))
    return Computing(tuple(map(float, needed)), tuple(map(float, ready)), float(whole))


@st.composite
def networks(draw: st.DrawFn, largest: int = 12) -> tuple[Computing, list[int]]:
    """What is computed, and the bytes of each parameter."""
    computing = draw(computings())
    count = len(computing.needed)
    return computing, draw(st.lists(st.integers(0, largest), min_size=count, max_size=count))


def filled(computing: Computing, sizes: Sequence[int], largest: int) -> list[Bucket]:
    """Buckets of at most so many bytes as they fill; larger parameters are cut."""
    loads: list[Bucket] = []
    for number in sorted(range(len(sizes)), key=lambda number: computing.ready[number]):
        left = sizes[number]
        while left > 0:
            if not loads or loads[-1].nbytes >= largest:
                loads.append(Bucket(0, ()))
            part = min(left, largest - loads[-1].nbytes)
            loads[-1] = Bucket(loads[-1].nbytes + part, (*loads[-1].parameters, number))
            left -= part
    return loads


def test_the_bucket_needed_first_passes_large_ones() -> None:
    """The picture: conv1, conv2, fc6, fc7, fc8 are parameters 0 to 4, and fc6 is cut into four."""
    computing = Computing(needed=(0, 2, 4, 5, 6), ready=(17, 15, 12, 11, 10), whole=17)
    names = ["fc8", "fc7", "fc6a", "fc6b", "fc6c", "fc6d", "conv2", "conv1"]
    loads = [Bucket(1, (4,)), Bucket(1, (3,)), *[Bucket(2, (2,))] * 4, Bucket(1, (1,)), Bucket(1, (0,))]
    order = sequence(computing, loads, BYTES)
    assert [names[number] for number in order] == ["fc8", "fc7", "fc6a", "fc6b", "conv2", "conv1", "fc6c", "fc6d"]


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
    there = [max(computing.ready[one] for one in load.parameters) for load in loads]
    due = [min(computing.needed[one] for one in load.parameters) for load in loads]
    now, left = 0.0, set(order)
    for number in order:
        now = max(now, min(there[one] for one in left))
        assert there[number] <= now
        assert due[number] == min(due[one] for one in left if there[one] <= now)
        left.remove(number)
        now += cost.seconds(loads[number].nbytes)


def test_all_gathers_go_where_the_link_would_be_idle() -> None:
    """The picture of halves: fc8, fc7 and two parts of fc6, then the link is free until conv2's gradient comes."""
    computing = Computing(needed=(0, 2, 4, 5, 6), ready=(20, 17, 9, 9, 9), whole=20)
    names = ["8", "7", "6a", "6b", "2", "1"]
    loads = [Bucket(2, (4,)), Bucket(2, (3,)), Bucket(2, (2,)), Bucket(2, (2,)), Bucket(2, (1,)), Bucket(2, (0,))]
    seen, halves = set[int](), list[str]()
    for number in sequence_of_halves(computing, loads, BYTES, 0.25):
        halves.append(("g" if number in seen else "r") + names[number])
        seen.add(number)
    assert " ".join(halves) == "r6a r6b g6a g6b r7 g7 r8 g8 r2 g2 r1 g1"


@given(networks(), st.integers(1, 20), st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([0.0, 0.25, 1.0]))
def test_the_half_that_is_ready_and_needed_first_is_next(
    network: tuple[Computing, list[int]], largest: int, latency: float, update: float
) -> None:
    """The link waits only for an all-gather that is more urgent, and comes while another half would be under way."""
    computing, cost = replace(network[0], update=update), Cost(latency, 1.0)
    loads = filled(*network, largest)
    order = sequence_of_halves(computing, loads, cost, 0.5)
    assert sorted(order) == sorted(2 * [*range(len(loads))])
    there = {(one, 0): max(computing.ready[at] for at in load.parameters) for one, load in enumerate(loads)}
    due = [min(computing.needed[at] for at in load.parameters) for load in loads]
    now = 0.0
    for number in order:
        now = max(now, min(there.values()))
        while True:
            _, _, first = min((due[one], turn, one) for (one, turn), ready in there.items() if ready <= now)
            ends = now + cost.seconds(loads[first].nbytes) / 2
            gathers = [(due[one], ready) for (one, turn), ready in there.items() if turn == 1]
            urgent = [ready for needed, ready in gathers if needed < due[first] and now < ready < ends]
            if not urgent:
                break
            now = min(urgent)
        half = 0 if (number, 0) in there else 1
        assert there[number, half] <= now
        assert due[number] == due[first]
        del there[number, half]
        now += cost.seconds(loads[number].nbytes) / 2
        if not half:
            there[number, 1] = now + 0.5 * update * loads[number].nbytes


def test_the_link_waits_for_an_update_of_a_first_layer() -> None:
    """Its all-gather follows at once; the one of a large last layer, which is there already, would be in its way."""
    computing = Computing(needed=(0, 2), ready=(6, 1), whole=6, update=0.1)
    loads = [Bucket(8, (1,)), Bucket(2, (0,))]
    assert sequence_of_halves(computing, loads, BYTES, 0.5) == (0, 0, 1, 1)
    loads = [Bucket(8, (1,)), Bucket(4, (1,)), Bucket(2, (0,))]
    assert sequence_of_halves(computing, loads, BYTES, 0.5) == (0, 1, 2, 2, 0, 1)


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
        sent = [loads[number] for number in order]
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


@given(networks())
def test_buckets_of_one_byte_reach_the_bound(network: tuple[Computing, list[int]]) -> None:
    """Gradients come at whole seconds, and a byte takes one: cut so, nothing that is urgent ever waits."""
    computing, sizes = network
    loads = filled(computing, sizes, 1)
    sent = [loads[number] for number in sequence(computing, loads, BYTES)]
    reached = step_of(computing, sent, BYTES)
    assert reached == bound(computing, sizes, BYTES)


@given(computings(), st.lists(st.integers(0, 4), max_size=6))
def test_the_bound_is_the_best_of_all_orders_of_all_pieces(computing: Computing, pieces: list[int]) -> None:
    pieces = [number % len(computing.needed) for number in pieces]

    def step(order: Sequence[int]) -> float:
        now, late = 0.0, 0.0
        for number in order:
            now = max(now, computing.ready[number]) + 1
            late = max(late, now - computing.needed[number] - computing.whole)
        return computing.whole + late

    best = min(step(order) for order in set(permutations(pieces)))
    assert bound(computing, [pieces.count(number) for number in range(len(computing.needed))], BYTES) == best


@pytest.mark.parametrize("per_byte", [1e-9, 0.1, 1 / 3])
def test_the_bound_terminates_with_inexact_seconds(per_byte: float) -> None:
    computing = Computing(tuple(i / 7 for i in range(50)), tuple(10 + (50 - i) / 3 for i in range(50)), 10 + 50 / 3)
    least = bound(computing, [1000 + i for i in range(50)], Cost(0.0, per_byte))
    assert least >= max(computing.whole, sum(1000 + i for i in range(50)) * per_byte)
