from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training.trace_format import check_trace

from unisono.engine import OperationSpan
from unisono.plan.choose import PredictionInputs, Setting, predicted, with_buckets
from unisono.rules import BSP
from unisono.step import operations as op
from unisono.step import program
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Bucket, Layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import TaskSpan, steady_step
from unisono.step.program import Operation, Task
from unisono.training import timeline as collecting
from unisono.training.timeline import (
    LANES,
    MAIN_THREAD,
    Event,
    Timeline,
    TimelineSpan,
    document,
    events,
    lane_of,
    lane_order,
    lay,
    spans_of,
    timeline_span,
)
from unisono.world import World

COMPUTING = Computing((0.0, 0.125), (0.75, 0.5), 0.75)
BUCKETS = [Bucket(1, (1,)), Bucket(1, (0,))]


class OneRank:
    """World of this process alone."""

    def barrier(self) -> None:
        """Return at once."""

    def all_gather_object(self, mine: Any) -> list[Any]:
        return [mine]

    def call_on_root(self, function: Callable[[], Any]) -> Any:
        return function()


def test_measured_and_predicted_spans_of_a_step_are_on_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting.time, "perf_counter", lambda: 100.0)
    timeline = Timeline(cast("World", OneRank()))
    inputs = PredictionInputs(BSP(), Costs(Layout(2, 2, ()), COMPUTING, Cost(0.125, 0.0)), lambda *_: BUCKETS)
    chosen = predicted(inputs, Setting("chain", 1))
    for begin in (101.0, 103.0):
        timeline.begin_step(begin, chosen)
    with timeline.span("wait for data", "waiting"):
        pass
    timeline.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    check_trace(document)
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans if span["cat"] == "waiting"] == [
        ("wait for data", 0.0, 0.0)
    ]
    forward = [span for span in spans if span["name"] == "forward"]
    assert {span["cat"] for span in forward} == {"predicted"}
    assert forward[0]["ts"] >= 1e6
    assert sum(span["dur"] for span in forward) == 2 * 0.125 * 1e6
    assert len([span for span in spans if span["name"] == "allreduce 1"]) == 2


MAIN, COMMUNICATION, UPDATE = "main", "communication 0", "update 0"


def work(name: str, kind: str, lane: str, begin: float, end: float) -> TimelineSpan:
    """A task's span by its name, "pack 1"; any other's has no operation."""
    operation, _, key = name.partition(" ")
    return TimelineSpan(name, kind, lane, begin, end, *((operation, int(key)) if key else ()))


def named(trace: list[Event], name: str) -> dict[int, object]:
    """What metadata events of a name say of each lane."""
    return {event["tid"]: next(iter(event["args"].values())) for event in trace if event["name"] == name}


def arrows(trace: list[Event]) -> dict[str, list[Event]]:
    """The flow events by their id."""
    by_id = defaultdict(list)
    for event in trace:
        if event["ph"] in ("s", "t", "f"):
            by_id[event["id"]].append(event)
    return by_id


def test_what_was_carried_out_in_microseconds() -> None:
    trace = list(events(3, [work("forward", "computing", MAIN, 0.5, 0.75)]))
    assert [event for event in trace if event["ph"] == "X"] == [
        {"ph": "X", "name": "forward", "cat": "computing", "pid": 3, "tid": 0, "ts": 500_000.0, "dur": 250_000.0}
    ]
    assert {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "rank 3"}} in trace


def test_each_span_is_in_its_lane_and_lanes_and_ranks_have_an_order() -> None:
    lanes = ["checkpoint", UPDATE, MAIN, "predicted main", UPDATE]
    trace = list(events(2, [work("work", "kind", lane, 0.0, 1.0) for lane in lanes]))
    names = named(trace, "thread_name")
    assert names == {0: MAIN, 1: "predicted main", 2: UPDATE, 3: "checkpoint"}
    assert named(trace, "thread_sort_index") == {lane: lane for lane in names}
    assert [names[event["tid"]] for event in trace if event["ph"] == "X"] == lanes
    assert [event["args"] for event in trace if event["name"] == "process_sort_index"] == [{"sort_index": 2}]


class Drawn(NamedTuple):
    """Spans of some steps as a chain of dependencies makes them, and the ends of each arrow that there should be."""

    spans: list[TimelineSpan]
    arrows: Counter[tuple[TimelineSpan, ...]]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """An exchange may begin long after its gradient, even in the backward pass of the next step, but before the next
    gradient of its bucket is packed. Times are exact."""
    ticks = st.integers(1, 9).map(lambda tick: tick / 64)
    keys = draw(st.integers(1, 4))
    updated = draw(st.sets(st.integers(1, keys)))  # not a bucket that completes no parameter
    spans, arrows, free = list[TimelineSpan](), Counter[tuple[TimelineSpan, ...]](), [0.0] * (keys + 1)
    now = line = updating = 0.0

    def span(name: str, lane: str, begin: float) -> TimelineSpan:
        spans.append(work(name, "kind", lane, begin, begin + draw(ticks)))
        return spans[-1]

    after = draw(st.booleans())  # whether all leaves once the backward pass has ended
    for _ in range(draw(st.integers(1, 4))):
        begin = now = span("forward", MAIN, now).end
        backward = span("backward", MAIN, begin) if after else None
        now, packs = backward.end if backward else begin, list[TimelineSpan]()
        for key in range(1, keys + 1):
            packs.append(span(f"pack {key}", "update 1", max(now, free[key]) + draw(ticks)))
            now = packs[-1].end
        if backward is None:
            backward = work("backward", "kind", MAIN, begin, now + draw(ticks))
            spans.append(backward)
            now = backward.end
        for key, pack in enumerate(packs, 1):
            exchange = span(
                f"allreduce {key}", COMMUNICATION, max(line, pack.end) + draw(ticks) * draw(st.integers(0, 3))
            )
            line, last = exchange.end, exchange
            chain = [backward, exchange]
            if key in updated:
                last = span(f"update {key}", UPDATE, max(updating, exchange.end))
                updating = last.end
                chain.append(last)
            free[key] = last.end
            arrows[tuple(chain)] += 1
    return Drawn(sorted(spans, key=lambda span: span.end), arrows)  # each is heard of when it has ended


@given(drawn())
def test_an_arrow_for_each_bucket_and_step_from_gradient_to_exchange_to_update(drawn: Drawn) -> None:
    """Each leads through the spans of its own step, and through no others."""
    trace = list(events(1, drawn.spans))
    lanes = {name: lane for lane, name in named(trace, "thread_name").items()}
    expected = Counter(
        tuple((span.name, lanes[span.lane], span.begin * 1e6, span.end * 1e6) for span in chain)
        for chain in drawn.arrows.elements()
    )
    slices = [event for event in trace if event["ph"] == "X"]
    met: Counter[tuple[tuple[str, int, float, float], ...]] = Counter()
    for arrow in arrows(trace).values():
        assert [event["ph"] for event in arrow] in (["s", "f"], ["s", "t", "f"])
        assert all(event["pid"] == 1 and event["bp"] == "e" for event in arrow)
        chain = []
        for event, what in zip(arrow, ("backward", "allreduce", "update"), strict=False):
            (inside,) = [
                span
                for span in slices
                if span["tid"] == event["tid"]
                and span["name"].partition(" ")[0] == what
                and (
                    span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
                    if what == "backward"
                    else span["ts"] == event["ts"]
                )
            ]
            chain.append((inside["name"], inside["tid"], inside["ts"], inside["ts"] + inside["dur"]))
        met[tuple(chain)] += 1
    assert met == expected


def test_an_exchange_in_the_next_step_belongs_to_its_own() -> None:
    spans = [
        *(work("backward", "computing", MAIN, 0, 2), work("pack 1", "update", UPDATE, 1, 2)),
        *(work("forward", "computing", MAIN, 2, 4), work("allreduce 1", "communication", COMMUNICATION, 3, 6)),
        *(work("update 1", "update", UPDATE, 6, 7), work("backward", "computing", MAIN, 4, 9)),
    ]
    (arrow,) = arrows(list(events(0, spans))).values()
    assert [(event["ph"], event["ts"]) for event in arrow] == [("s", 1e6), ("t", 3e6), ("f", 6e6)]


def step_of(begin: float, keys: int) -> list[TimelineSpan]:
    """A step of one second in which all goes on at once."""
    times = count()
    spans = [work("backward", "computing", MAIN, begin, begin + 1)]
    for key in range(1, keys + 1):
        at = begin + next(times) / 16
        spans.append(work(f"pack {key}", "update", UPDATE, at, at + 1 / 64))
        spans.append(work(f"allreduce {key}", "communication", COMMUNICATION, at + 1 / 64, at + 2 / 64))
        spans.append(work(f"update {key}", "update", UPDATE, at + 2 / 64, at + 3 / 64))
    return spans


def test_arrows_of_all_ranks_have_names_of_their_own_and_all_is_as_the_format_demands() -> None:
    spans = [*step_of(0, 3), *step_of(1, 3)]
    ranks = [list(events(rank, spans)) for rank in range(3)]
    for trace in ranks:
        assert len(arrows(trace)) == 2 * 3
        assert all([event["ph"] for event in arrow] == ["s", "t", "f"] for arrow in arrows(trace).values())
    assert len({name for trace in ranks for name in arrows(trace)}) == 3 * 2 * 3
    written = json.loads(json.dumps(document([spans] * 3)))
    check_trace(written)
    assert written["traceEvents"] == [event for trace in ranks for event in trace]


times = st.floats(0, 1e5)


@given(times, times, times)
def test_spans_that_touch_still_do_in_the_trace(first: float, second: float, third: float) -> None:
    """Times have whole nanoseconds: sums of rounded microseconds would cross."""
    begin, middle, end = sorted((first, second, third))
    touching = [work("a", "kind", UPDATE, begin, middle), work("b", "kind", UPDATE, middle, end)]
    nested = [work("whole", "kind", MAIN, begin, end), work("part", "kind", MAIN, middle, end)]
    check_trace(document([[*touching, *nested]]))


def test_without_a_backward_pass_there_is_nothing_to_lead_from() -> None:
    """As on a rank whose share of the batch is empty."""
    assert not arrows(list(events(0, step_of(0, 3)[1:])))
    assert {event["ph"] for event in events(0, [])} == {"M"}


IN_ORDER = [
    "main",
    "predicted main",
    "predicted main 2",
    "computing 0",
    "communication 0",
    "communication 1",
    "communication 10",
    "predicted communication",
    "update 0",
    "predicted update",
    "server 0",
    "loading",
    "decoding 0",
    "decoding 2",
    "decoding 10",
    "test decoding 0",
    "shuffle",
    "evaluation",
    "checkpoint",
    "a thread",
    "b thread",
]


def test_a_span_says_what_its_task_is() -> None:
    span = OperationSpan("pack 3", "update", "unisono update 0", 5.0, 6.0, Task(op.PACK, 3, "update"))
    assert timeline_span(span, zero=4.0) == TimelineSpan("pack 3", "update", "update 0", 1.0, 2.0, "pack", 3)
    assert timeline_span(span._replace(about=None)).operation == ""


@pytest.mark.parametrize(
    ("kind", "thread", "lane"),
    [
        ("computing", MAIN_THREAD, "main"),
        ("main", MAIN_THREAD, "main"),
        ("waiting", MAIN_THREAD, "main"),
        ("computing", "unisono computing 0", "computing 0"),
        ("communication", "unisono communication 1", "communication 1"),
        ("update", "unisono update 0", "update 0"),
        ("server", "server 1", "server 1"),
        ("decoding", "decoding_7", "decoding 7"),
        ("decoding", "test decoding_0", "test decoding 0"),
        ("loading", MAIN_THREAD, "loading"),
        ("shuffle", MAIN_THREAD, "shuffle"),
        ("evaluation", MAIN_THREAD, "evaluation"),
        ("checkpoint", MAIN_THREAD, "checkpoint"),
    ],
)
def test_the_lane_of_work(kind: str, thread: str, lane: str) -> None:
    assert lane_of(kind, thread) == lane
    assert lane.rstrip(" 0123456789") in LANES


def test_the_main_thread_has_the_name_that_lanes_go_by() -> None:
    assert threading.main_thread().name == MAIN_THREAD


@given(st.permutations(IN_ORDER))
def test_lanes_have_one_order_whatever_came_first(lanes: list[str]) -> None:
    assert sorted(lanes, key=lane_order) == IN_ORDER


ALLREDUCE = op.allreduce("auto", None)


def played(operation: Operation, key: int, lane: str, begin: float, end: float) -> TaskSpan:
    return TaskSpan(0, 0, Task(operation, key, lane), begin, end)


def shown(name: str, lane: str, begin: float, end: float) -> TimelineSpan:
    return TimelineSpan(name, "predicted", f"predicted {lane}", begin, end)


STEP = [
    shown("forward", "main", 0, 2),
    shown("backward 1", "main", 2, 6),
    shown("allreduce 1", "communication", 4, 9),
]


def test_reading_is_one_span_up_to_a_wait_and_what_takes_no_time_is_left_out() -> None:
    spans = [
        played(op.BEGIN, 0, program.MAIN, 0, 1),
        played(op.FORWARD, 0, program.MAIN, 1, 2),
        played(op.FORWARD, 1, program.MAIN, 2, 2),
        played(op.FORWARD, 2, program.MAIN, 3, 5),
        played(op.PACK, 1, program.UPDATE, 5, 5),
        played(op.BACKWARD, 0, program.MAIN, 5, 7),
        played(op.BACKWARD, 1, program.MAIN, 7, 9),
        played(ALLREDUCE, 1, program.COMMUNICATION, 9, 12),
        played(op.UPDATE, 1, program.UPDATE, 12, 12.5),
    ]
    assert spans_of(spans) == [
        shown("forward", "main", 0, 2),
        shown("forward", "main", 3, 5),
        shown("backward 0", "main", 5, 7),
        shown("backward 1", "main", 7, 9),
        shown("allreduce 1", "communication", 9, 12),
        shown("update 1", "update", 12, 12.5),
    ]


def test_a_step_is_laid_at_the_begin_of_each_measured_one() -> None:
    assert lay([(10, STEP), (20, STEP)]) == [
        shown("forward", "main", 10, 12),
        shown("backward 1", "main", 12, 16),
        shown("forward", "main", 20, 22),
        shown("backward 1", "main", 22, 26),
        shown("allreduce 1", "communication", 14, 19),
        shown("allreduce 1", "communication", 24, 29),
    ]
    assert lay([]) == []


def test_a_step_that_was_faster_than_predicted_has_the_next_prediction_in_a_lane_below() -> None:
    """The measured steps take 4: the second begins while the first, as predicted, is in its backward pass."""
    assert lay([(0, STEP), (4, STEP)]) == [
        shown("forward", "main", 0, 2),
        shown("backward 1", "main", 2, 6),
        shown("forward", "main 2", 4, 6),
        shown("backward 1", "main 2", 6, 10),
        shown("allreduce 1", "communication", 4, 9),
        shown("allreduce 1", "communication 2", 8, 13),
    ]


def test_collectives_at_once_have_a_lane_each_and_a_step_that_overlaps_has_as_many_below() -> None:
    step = [shown("allreduce 1", "communication", 1, 4), shown("allreduce 2", "communication", 2, 5)]
    assert lay([(begin, step) for begin in (0, 3, 6)]) == [
        shown("allreduce 1", "communication", 1, 4),
        shown("allreduce 2", "communication 2", 2, 5),
        shown("allreduce 1", "communication", 7, 10),
        shown("allreduce 2", "communication 2", 8, 11),
        shown("allreduce 1", "communication 3", 4, 7),
        shown("allreduce 2", "communication 4", 5, 8),
    ]


@given(
    st.sampled_from(sorted(OVERLAPS)),
    st.booleans(),
    st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True),
)
def test_predicted_spans_neither_overlap_nor_begin_before_their_step(
    overlap: str, deferred: bool, begins: list[int]
) -> None:
    computing = Computing((0.0, 2.0, 3.0), (16.0, 12.0, 8.0), 16.0, 0.5)
    sent = [Bucket(4, (2,)), Bucket(2, (1,)), Bucket(1, (0,))]
    layout = with_buckets(Layout(2, 3, (), deferred=deferred), computing, sent)
    step = spans_of(steady_step(BSP(overlap=overlap), Costs(layout, computing, Cost(0.5, 1.0))))
    for begin in begins:
        alone = lay([(begin, step)])
        assert min(span.begin for span in alone) >= begin
    laid = lay([(begin, step) for begin in sorted(begins)])
    assert len(laid) == len(begins) * len(step)
    for lane in {span.lane for span in laid}:
        mine = [span for span in laid if span.lane == lane]
        assert all(before.end <= after.begin for before, after in pairwise(mine))
