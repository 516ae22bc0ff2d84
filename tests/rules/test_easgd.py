"""EASGD's step programs: verified in any order of arrival; wrong ones are refused; bytes and times as said."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import StepError, UsageError
from unisono.rules import EASGD, Exchange
from unisono.rules.asynchronous import serving_programs
from unisono.rules.easgd import SWAP
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Layout, even_layout
from unisono.step.predict import Clock
from unisono.step.program import Arrival, Step, StepProgram
from unisono.step.verify import verify
from unisono.view.step import draw, picture_of


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["rank", "thread"]),
    st.sampled_from(["chain", "concurrent", "funnel", "none"]),
    st.integers(0, 1 << 20),
)
def test_every_order_of_arrival_is_right(
    ranks: int, servers: int, period: int, buckets: int, server: str, overlap: str, seed: int
) -> None:
    if (server == "rank" and servers >= ranks) or servers > ranks:
        return
    rule = EASGD(overlap=overlap, period=period, server=server, servers=servers)
    verify(rule, even_layout(ranks, max(buckets, servers)), [Step(step) for step in range(7)], seed)


def test_accumulated_gradients_and_absent_batches() -> None:
    steps = [Step(0, synchronize=False), Step(1), Step(2, synchronize=False), Step(3)]
    verify(EASGD(), even_layout(3, 2), steps, absent={1: {1}})


def without(program: StepProgram, name: str) -> StepProgram:
    return tuple(task for task in program if task.operation.name != name)


@dataclass(frozen=True)
class NeverPulls(EASGD):
    def __call__(self, event: Step, worker: int, layout: Layout) -> StepProgram:
        return without(super().__call__(event, worker, layout), "pull")


@dataclass(frozen=True)
class NeverMoves(EASGD):
    def serve(self, event: Arrival, server: int, layout: Layout) -> StepProgram:
        return without(super().serve(event, server, layout), "move")


@dataclass(frozen=True)
class PullsTwice(EASGD):
    def __call__(self, event: Step, worker: int, layout: Layout) -> StepProgram:
        program = super().__call__(event, worker, layout)
        return tuple(
            repeated for task in program for repeated in ([task, task] if task.operation.name == "pull" else [task])
        )


@dataclass(frozen=True)
class UpdatesFirst(EASGD):
    def __call__(self, event: Step, worker: int, layout: Layout) -> StepProgram:
        program = super().__call__(event, worker, layout)
        pulls = [task for task in program if task.operation.name == "pull"]
        return (*without(program, "pull"), *pulls)


@dataclass(frozen=True)
class Unordered(EASGD):
    def serve(self, event: Arrival, server: int, layout: Layout) -> StepProgram:
        program = super().serve(event, server, layout)
        return tuple(t._replace(writes=()) if t.operation.name == "announce" else t for t in program)


@dataclass(frozen=True)
class OneSided(EASGD):
    def serve(self, event: Arrival, server: int, layout: Layout) -> StepProgram:
        return super().serve(event, server, layout)[:-3]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (NeverPulls(), r"rank 0: swap 1 overwrites a bucket that came and was not used|was not used"),
        (NeverMoves(), r"overwrites a bucket that came and was not used|was not used"),
        (PullsTwice(), r"pull \d uses bucket \d of the other end, which has not come"),
        (UpdatesFirst(), r"pull \d pulls other weights of parameter \d than were sent"),
        (Unordered(), r"share communicator 0 of ranks \(\d, 2\), but no value orders them"),
        (OneSided(), r"of their group is swap 2 on rank 0, and announce 0 on rank 2"),
    ],
)
def test_wrong_programs_are_refused(rule: EASGD, message: str) -> None:
    with pytest.raises(StepError, match=message):
        verify(rule, even_layout(3, 2), [Step(0), Step(1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "EASGD: alpha = 0.0, but it has to be above 0"),
        ({"alpha": 1.5}, "EASGD: alpha = 1.5, but it has to be at most 1"),
        ({"period": 0}, "EASGD: period = 0, but it has to be at least 1"),
        ({"servers": 0}, "EASGD: servers = 0, but it has to be at least 1"),
        ({"exchange": Exchange("ring")}, r"algorithm='ring'\)\): workers exchange with servers.*; leave the"),
        ({"server": "cloud"}, "EASGD: server = 'cloud'; it is one of rank, thread"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EASGD(**options)  # type: ignore[arg-type]


def test_too_few_ranks_and_too_tight_a_bound_are_refused() -> None:
    with pytest.raises(UsageError, match="ranks of their own, beside workers, and 2 ranks are too few: start 3"):
        EASGD(servers=2).seats(2)
    with pytest.raises(UsageError, match=r"EASGD\(staleness=2\): 4 workers that take turns already have a staleness"):
        EASGD(staleness=2).seats(5)
    assert EASGD(staleness=3).seats(5) == (4, 1)
    assert EASGD(server="thread", servers=2).seats(2) == (2, 2)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("period", [1, 2, 4])
def test_bytes_are_as_the_rule_says(servers: int, period: int) -> None:
    """n / period a step each way on a worker; p n / period on the servers together, dealt evenly."""
    layout = even_layout(4 + servers, 4)
    total = sum(bucket.nbytes for bucket in layout.buckets)
    steps = [Step(step) for step in range(4)]
    rule = EASGD(period=period, servers=servers)
    sent = [
        sum(layout.bucket(task.key).nbytes for task in program if task.operation is SWAP)
        for program in rule.programs(layout, steps)
    ]
    assert sent[:4] == [total * len(steps) // period] * 4
    assert [Fraction(nbytes) for nbytes in sent[4:]] == [Fraction(4 * total * len(steps), period * servers)] * servers


def test_the_server_takes_one_worker_after_another() -> None:
    """3 workers that come at once, a swap of 2 s: the last one waits for 6, of which computing hides 1."""
    layout = even_layout(4, 1)
    costs = Costs(layout, Computing((0.0,), (1.0,), 2.0), Cost(0.0, 2.0 / layout.bucket(1).nbytes))
    rule = EASGD()
    programs = {seat: rule(Step(0), seat, layout) for seat in range(3)}
    programs[3] = serving_programs(rule, layout, [[0, 1, 2]])[0]
    spans = Clock(programs, rule.threads(), lambda _, task: task.operation.price(task, costs)).run()
    assert [span.end for span in spans if span.task.operation is SWAP and span.rank < 3] == [3.0, 5.0, 7.0]


def test_a_workers_step_is_drawn() -> None:
    picture = draw(picture_of(EASGD(), even_layout(3, 2), 1))
    assert "x swap" in picture and "l pull" in picture
