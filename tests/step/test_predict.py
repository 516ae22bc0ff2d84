"""When tasks begin and end, in seconds that can be followed by hand; arrows in comments: when an exchange goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import StepError
from unisono.plan.choose import with_buckets
from unisono.rules import BSP, BaseRule, DiLoCo, Exchange, LocalSGD
from unisono.step.costs import Computing, Cost, Costs, Duration, Prediction
from unisono.step.layout import ActivationExchange, Bucket, Layout
from unisono.step.operations import BARRIER, PACK
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import Clock, TaskSpan, predict, steady_step, tracks
from unisono.step.program import Operation, RankGroup, Role, Step, StepProgram, Task, order

BYTES = Cost(0.0, 1.0)
"""A second for a byte."""

TWO = Computing(needed=(0, 4), ready=(12, 8), whole=12)
"""Two layers: forward until 8 at the latest, w1's gradient at 8, w0's at 12."""

NAMES = sorted(OVERLAPS)


def layout_of(computing: Computing, sent: list[Bucket], deferred: bool = True, ranks: int = 2) -> Layout:
    return with_buckets(Layout(ranks, len(computing.needed), (), deferred=deferred), computing, sent)


def played(computing: Computing, loads: list[Bucket], cost: Cost, name: str, deferred: bool) -> Prediction:
    return predict(BSP(overlap=name), Costs(layout_of(computing, loads, deferred), computing, cost))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Computing, list[Bucket]]:
    """Whole seconds, so that sums are exact; buckets as they fill."""
    count, forward = draw(st.integers(1, 6)), draw(st.integers(0, 9))
    needed = sorted(draw(st.lists(st.integers(0, forward), min_size=count, max_size=count)))
    ready = sorted(draw(st.lists(st.integers(forward, 30), min_size=count, max_size=count)), reverse=True)
    loads, left = [], list(reversed(range(count)))
    while left:
        members = tuple(left[: draw(st.integers(1, 3))])
        parts = draw(st.integers(1, 3)) if len(members) == 1 else 1
        loads += [Bucket(draw(st.integers(1, 9)), members) for _ in range(parts)]
        left = left[len(members) :]
    update = draw(st.sampled_from([0.0, 0.5]))
    return Computing(tuple(map(float, needed)), tuple(map(float, ready)), float(max(ready)), update), loads


def without_updates(case: tuple[Computing, list[Bucket]]) -> tuple[Computing, list[Bucket]]:
    return replace(case[0], update=0.0), case[1]


costs = st.builds(Cost, st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 0.25, 1.0, 3.0]))


@pytest.mark.parametrize(
    ("name", "deferred", "step"),
    [
        ("chain", False, 15),  # 8→14→15, beside the backward pass
        ("chain", True, 15),  # w0 is needed at once, w1 4 after 12, when it is there
        ("funnel", False, 19),  # 8→14 while nothing is computed, so that w0's gradient comes at 18→19
        ("funnel", True, 15),  # the backward pass has a thread of its own
        ("none", False, 19),  # 12→18→19
        ("none", True, 19),  # the same: the main thread exchanges, and cannot compute meanwhile
        ("concurrent", False, 15),  # 8→14, a barrier that holds the main thread up until 14, 14→15
        ("concurrent", True, 15),
    ],
)
def test_two_layers(name: str, deferred: bool, step: float) -> None:
    assert played(TWO, [Bucket(6, (1,)), Bucket(1, (0,))], BYTES, name, deferred) == Prediction(step, 7, step - 12)


@pytest.mark.parametrize("rule", [DiLoCo(every=1, fragments=1, delay=0), LocalSGD(Exchange(wire="int8"), every=1)])
def test_changes_of_weights_are_computed_on_the_host(rule: BaseRule) -> None:
    """For which the weights are copied from a device twice, before the exchange and behind it, and back once."""
    loads = [Bucket(6, (1,)), Bucket(1, (0,))]
    layout = layout_of(TWO, loads, deferred=False)
    here = predict(rule, Costs(layout, TWO, Cost(0.0, 0.0))).step
    priced = replace(TWO, pack=1.0, unpack=0.5)
    assert predict(rule, Costs(layout, priced, Cost(0.0, 0.0))).step == here
    there = predict(rule, Costs(layout, replace(priced, streams=True), Cost(0.0, 0.0)))
    assert there.step == here + 7 * (1 + 1 + 0.5)


def test_the_exchange_of_a_late_layer_overlaps_with_the_next_forward_pass() -> None:
    """w1 8→20: it is 4 into the next step that it is needed, so the step takes 16, and w0 is long there."""
    loads = [Bucket(1, (0,)), Bucket(8, (1,))]
    swapped = Computing(needed=(0, 4), ready=(8, 12), whole=12)
    assert played(swapped, loads, BYTES, "chain", deferred=False).step == 20
    assert played(swapped, loads, BYTES, "chain", deferred=True).step == 16
    assert played(swapped, loads, BYTES, "none", deferred=True).step == 21


def test_the_order_of_exchange_decides_how_much_hides() -> None:
    """w2, of 12, in four parts: as they fill 8→20→21→22; or 8→11, w1 11→12, w0 12→13, and the rest →22, 6 too late."""
    computing = Computing(needed=(0, 2, 4), ready=(12, 10, 8), whole=12)
    parts, last = [Bucket(3, (2,))] * 4, [Bucket(1, (1,)), Bucket(1, (0,))]
    assert played(computing, [*parts, *last], BYTES, "chain", deferred=True).step == 22
    assert played(computing, [parts[0], *last, *parts[1:]], BYTES, "chain", deferred=True).step == 18


def test_the_control_message_goes_first_and_takes_a_latency() -> None:
    """8→9, then 9→13, 13→15."""
    loads = [Bucket(3, (1,)), Bucket(1, (0,))]
    assert played(TWO, loads, Cost(1.0, 1.0), "chain", deferred=False) == Prediction(15, 7, 3)


def test_concurrent_exchanges_share_the_link_but_not_the_latency() -> None:
    """Control message 8→10, bucket 1 10→12; a barrier until 14; buckets 2 and 3 both 14→16, as in a chain."""
    loads = [Bucket(1, (1,)), Bucket(1, (1,)), Bucket(1, (0, 1))]
    early = Computing(needed=(0, 4), ready=(8, 8), whole=12)
    latency = Cost(2.0, 0.0)
    assert played(early, loads, latency, "chain", deferred=False) == Prediction(16, 8, 4)
    assert played(early, loads, latency, "concurrent", deferred=True) == Prediction(16, 8, 4)
    four = [*loads, Bucket(1, (0,))]  # 14→16 and, after another barrier, 18→20
    assert played(early, four, latency, "chain", deferred=True) == Prediction(18, 10, 6)
    assert played(early, four, latency, "concurrent", deferred=True) == Prediction(20, 10, 8)


def test_two_exchanges_at_once_are_no_faster_than_one_after_another() -> None:
    """Bucket 2 (after a barrier, at 9) and bucket 3 are 8 together: 9→17."""
    early = Computing(needed=(0, 4), ready=(8, 8), whole=8)
    loads = [Bucket(1, (1,)), Bucket(4, (1,)), Bucket(4, (0,))]
    for name in ("chain", "concurrent"):
        assert played(early, loads, BYTES, name, deferred=True).step == 17


def test_updates_run_one_at_a_time_beside_exchanges() -> None:
    """Allreduces 8→11 and, as the thread that packs updates w1 until 14, 14→15; updates 11→14, 15→16."""
    computing = Computing(TWO.needed, TWO.ready, TWO.whole, update=1.0)
    assert played(computing, [Bucket(3, (1,)), Bucket(1, (0,))], BYTES, "chain", deferred=False).step == 16


def test_a_parameter_is_ready_with_its_last_part() -> None:
    """8→10, 12→13, and w1's rest 13→23, 7 too late for the next step."""
    loads = [Bucket(2, (1,)), Bucket(1, (0,)), Bucket(10, (1,))]
    assert played(TWO, loads, BYTES, "chain", deferred=True).step == 19


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deferred", [True, False])
def test_without_buckets_a_step_is_its_computing(name: str, deferred: bool) -> None:
    assert played(TWO, [], BYTES, name, deferred) == Prediction(12, 0, 0)


@given(cases(), st.sampled_from(NAMES), st.booleans())
def test_free_exchanges_take_no_time(case: tuple[Computing, list[Bucket]], name: str, deferred: bool) -> None:
    computing, loads = case
    free = Computing(computing.needed, computing.ready, computing.whole)
    assert played(free, loads, Cost(0.0, 0.0), name, deferred) == Prediction(computing.whole, 0, 0)


@given(cases(), costs, st.sampled_from(NAMES), st.booleans())
def test_a_step_is_computing_and_waiting(
    case: tuple[Computing, list[Bucket]], cost: Cost, name: str, deferred: bool
) -> None:
    computing, loads = case
    prediction = played(computing, loads, cost, name, deferred)
    assert prediction.waiting == prediction.step - computing.whole >= 0
    assert prediction.communicating == cost.seconds(0) + sum(cost.seconds(load.nbytes) for load in loads)


@given(cases(), costs, st.booleans())
def test_no_overlap_is_never_faster_than_a_chain(
    case: tuple[Computing, list[Bucket]], cost: Cost, deferred: bool
) -> None:
    case = without_updates(case)
    assert played(*case, cost, "none", deferred).step >= played(*case, cost, "chain", deferred).step


@given(cases(), costs, st.sampled_from(NAMES))
def test_deferred_waiting_is_never_slower(case: tuple[Computing, list[Bucket]], cost: Cost, name: str) -> None:
    case = without_updates(case)
    assert played(*case, cost, name, deferred=True).step <= played(*case, cost, name, deferred=False).step


@given(cases(), costs, st.sampled_from(["chain", "none"]), st.booleans())
def test_a_faster_network_is_never_slower(
    case: tuple[Computing, list[Bucket]], cost: Cost, name: str, deferred: bool
) -> None:
    """Where updates take time it can be: they share a thread with packing, and what comes sooner may hold up more."""
    case = without_updates(case)
    step = played(*case, cost, name, deferred).step
    assert played(*case, Cost(cost.latency, cost.per_byte / 2), name, deferred).step <= step
    assert played(*case, Cost(cost.latency / 2, cost.per_byte), name, deferred).step <= step


@given(cases(), costs)
def test_a_chain_is_one_exchange_after_another_each_once_its_bucket_is_full(
    case: tuple[Computing, list[Bucket]], cost: Cost
) -> None:
    computing, loads = case
    computing = Computing(computing.needed, computing.ready, computing.whole)
    now = min(computing.ready) + cost.latency
    for load in loads:
        now = max(now, *(computing.ready[parameter] for parameter in load.parameters)) + cost.seconds(load.nbytes)
    assert played(computing, loads, cost, "chain", deferred=False).step == max(now, computing.whole)


def test_a_steady_step_begins_with_what_the_step_before_has_left() -> None:
    """w0 comes 3 into the step, from the exchange that the step before has begun."""
    costs = Costs(layout_of(TWO, [Bucket(6, (1,)), Bucket(1, (0,))], True), TWO, BYTES)
    spans = [span for span in steady_step(BSP(overlap="chain"), costs) if span.end > span.begin]
    assert [(str(span.task), span.begin, span.end) for span in spans] == [
        ("forward 0", 3, 7),
        ("backward 0", 7, 11),
        ("backward 2", 11, 15),
        ("allreduce 1", 11, 17),
        ("allreduce 2", 17, 18),
    ]


@pytest.mark.parametrize(
    ("link", "step"),
    [
        (0.0, 19),  # 12 of computing, exchanges of 2, 3 and 2
        (2.0, 25),  # that of the input gradient, 13→15, waits for w1's allreduce, 13→19, on the same link
    ],
)
def test_computing_waits_for_activations_which_share_the_link_with_gradients(link: float, step: float) -> None:
    """w1 is split over ranks 0 and 1 of 4: its own 6 bytes are averaged with rank 2, those of w0 with all."""
    pairs = ((0, 1), (2, 3))
    sent = [Bucket(6, (1,), groups=((0, 2), (1, 3))), Bucket(1, (0,))]
    exchanges = tuple(ActivationExchange(1, 2, pairs, *when) for when in ((False, False), (True, False), (True, True)))
    layout = replace(layout_of(TWO, sent, False, 4), activations=exchanges)
    durations = Duration(2, link), Duration(3, link), Duration(2, link)
    costs = Costs(layout, TWO, Cost(0.0, 0.0), groups={(0, 2): BYTES}, activations=durations)
    prediction = predict(BSP(overlap="chain"), costs)
    assert (prediction.step, prediction.communicating) == (step, 13)


@pytest.mark.parametrize("deferred", [True, False])
def test_norms_of_split_layers_take_a_latency(deferred: bool) -> None:
    """The whole step waits for them, as for the norm that gradients are clipped by; whole layers need none."""
    sent = [Bucket(6, (1,), groups=((0, 2), (1, 3))), Bucket(1, (0,))]
    split = replace(layout_of(TWO, sent, deferred, 4), clip=1.0)
    unsplit = replace(split, buckets=tuple(bucket._replace(groups=()) for bucket in sent))

    def predicted(layout: Layout) -> Prediction:
        return predict(BSP(overlap="chain"), Costs(layout, replace(TWO, update=0.5), Cost(0.25, 0.0)))

    without, norms = predicted(split), predicted(replace(split, layer_norms=True))
    assert norms.step == without.step + 0.25
    assert predicted(replace(unsplit, layer_norms=True)) == predicted(unsplit)


@given(cases(), costs, st.sampled_from(NAMES), st.booleans())
def test_a_steady_step_has_the_tasks_of_a_program_and_none_begins_before_it(
    case: tuple[Computing, list[Bucket]], cost: Cost, name: str, deferred: bool
) -> None:
    computing, loads = case
    rule, layout = BSP(overlap=name), layout_of(computing, loads, deferred)
    spans = steady_step(rule, Costs(layout, computing, cost))
    program = rule(Step(0), 0, layout)
    assert [span.task for span in sorted(spans, key=lambda span: span.place)] == list(program)
    assert sorted(span.place for span in spans) == list(range(len(program)))
    assert min(span.begin for span in spans) == 0
    assert [span.end for span in spans] == sorted(span.end for span in spans)


def test_phases_within_nodes_take_what_their_ranks_take_and_else_nothing() -> None:
    """w1 8→9 in the node, 9→15 on the link, 15→16 in the node; w0 12→13→16→17, its link is free at 15."""
    layout = replace(layout_of(TWO, [Bucket(6, (1,)), Bucket(1, (0,))], False, 4), nodes=((0, 1), (2, 3)))
    rule = BSP(overlap="phases")
    free = predict(rule, Costs(layout, TWO, BYTES))
    assert free == predict(BSP(overlap="chain"), Costs(layout, TWO, BYTES)) == Prediction(15, 7, 3)
    known = predict(rule, Costs(layout, TWO, BYTES, groups={(0, 1): Cost(2.0, 0.0)}))
    assert known == Prediction(17, 11, 5)
    slower = predict(rule, Costs(layout, TWO, BYTES, groups={(0, 1): Cost(2.0, 0.0), (0, 2): Cost(0.0, 2.0)}))
    assert slower == Prediction(24, 18, 12)


def test_a_steady_step_of_a_period_is_its_first() -> None:
    rule, layout = LocalSGD(every=3), layout_of(TWO, [Bucket(6, (1,)), Bucket(1, (0,))], True)
    spans = steady_step(rule, Costs(layout, TWO, BYTES))
    assert [span.task for span in sorted(spans, key=lambda span: span.place)] == list(rule(Step(0), 0, layout))
    assert min(span.begin for span in spans) == 0


ALL = RankGroup((0, 1, 2))
OTHER = RankGroup((0, 1, 2), 1)
ALLREDUCE = Operation("allreduce", None, lambda *_: None, lambda *_: Duration(0.0), Role.COLLECTIVE)


def times(
    programs: dict[int, StepProgram],
    prices: dict[str, Duration],
    threads: dict[str, int] | None = None,
    beside: float = 1.0,
) -> dict[tuple[int, str], tuple[float, float]]:
    clock = Clock(programs, threads or {"a": 1, "b": 1}, lambda _, task: prices[str(task)], beside=beside)
    return {(span.rank, str(span.task)): (span.begin, span.end) for span in clock.run()}


def test_a_lane_runs_what_is_ready_first_and_as_many_as_it_has_threads() -> None:
    work = tuple(Task(PACK, key, "a") for key in (1, 2, 3))
    prices = {"pack 1": Duration(3), "pack 2": Duration(1), "pack 3": Duration(1)}
    assert times({0: work}, prices) == {(0, "pack 1"): (0, 3), (0, "pack 2"): (3, 4), (0, "pack 3"): (4, 5)}
    two = times({0: work}, prices, {"a": 2})
    assert two == {(0, "pack 1"): (0, 3), (0, "pack 2"): (0, 1), (0, "pack 3"): (1, 2)}


def test_a_collective_begins_with_its_last_member() -> None:
    sending = Task(ALLREDUCE, 1, "b", (order(0),), (), ALL)
    programs = {rank: (Task(PACK, rank, "a", (), (order(0),)), sending) for rank in (0, 2)}
    prices = {"pack 0": Duration(1), "pack 2": Duration(5), "allreduce 1": Duration(2)}
    placed = times(programs, prices)
    assert placed[0, "allreduce 1"] == placed[2, "allreduce 1"] == (5, 7)


def test_collectives_at_once_share_the_link_but_not_the_latency() -> None:
    program = (Task(ALLREDUCE, 1, "a", (), (), ALL), Task(ALLREDUCE, 2, "b", (), (), OTHER))
    alike = Duration(3.0, 2.0)  # a latency of 1
    assert times({0: program}, {"allreduce 1": alike, "allreduce 2": alike}) == {
        (0, "allreduce 1"): (0, 3),
        (0, "allreduce 2"): (0, 5),
    }


def test_computing_and_a_collective_at_once_slow_each_other_down() -> None:
    program = (Task(PACK, 1, "a"), Task(ALLREDUCE, 1, "b", (), (), ALL), Task(ALLREDUCE, 2, "b", (), (), ALL))
    prices = {"pack 1": Duration(4), "allreduce 1": Duration(2, 2), "allreduce 2": Duration(0)}
    assert times({0: program}, prices, beside=0.5) == {
        (0, "allreduce 1"): (0, 4),
        (0, "allreduce 2"): (4, 4),
        (0, "pack 1"): (0, 6),
    }
    prices |= {"pack 1": Duration(1), "allreduce 2": Duration(3, 2)}
    placed = times({0: program}, prices, {"a": 1, "b": 2}, beside=0.5)  # 2 s for 1, then the link is theirs
    assert placed == {(0, "pack 1"): (0, 2), (0, "allreduce 1"): (0, 3), (0, "allreduce 2"): (0, 5)}


def test_the_callback_sees_each_task_in_order_of_time() -> None:
    heard: list[str] = []
    program = (Task(PACK, 1, "a", (), (order(0),)), Task(BARRIER, 2, "b", (), (), ALL), Task(PACK, 3, "a", (order(0),)))
    clock = Clock(
        {0: program}, {"a": 1, "b": 1}, lambda *_: Duration(1), lambda ended: heard.append(str(ended[0].task))
    )
    spans: list[TaskSpan] = clock.run()
    assert heard == ["pack 1", "barrier 2", "pack 3"]
    assert [span.place for span in spans] == [0, 1, 2]


def test_deadlocked_ranks_are_named() -> None:
    with pytest.raises(StepError, match="rank 0 in allreduce 1"):
        times({0: (Task(ALLREDUCE, 1, "a", (), (), ALL),), 1: ()}, {"allreduce 1": Duration(1)})


class Span(NamedTuple):
    begin: float
    end: float
    name: str = ""


def test_each_span_goes_to_the_first_free_track() -> None:
    first, second, third = Span(0, 4, "one"), Span(2, 8, "two"), Span(4, 6, "three")
    assert tracks([third, second, first]) == [[first, third], [second]]
    assert tracks([]) == []


spans = st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda pair: Span(pair[0], sum(pair)))


@given(st.lists(spans))
def test_no_two_overlap_and_there_are_no_more_tracks_than_spans_at_once(given: list[Span]) -> None:
    packed = tracks(given)
    assert sorted(span for track in packed for span in track) == sorted(given)
    assert all(before.end <= after.begin for track in packed for before, after in pairwise(track))
    at_once = max((sum(span.begin <= time < span.end for span in given) for time in range(30)), default=0)
    assert len(packed) == at_once
