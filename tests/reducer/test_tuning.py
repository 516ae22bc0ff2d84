"""A Tuning, driven step by step, among ranks, exchanges and a clock that are made up."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from unisono.errors import UsageError
from unisono.plan.choose import FINER, SIZES, Setting
from unisono.reducer import tuning as module
from unisono.reducer.memory_layout import plan_memory
from unisono.reducer.tuning import FIRST, LARGE, SMALL, TRIALS, Tuning
from unisono.rules import BSP, Exchange
from unisono.step.costs import Computing, Cost
from unisono.step.layout import Bucket
from unisono.step.overlaps import OVERLAPS

LENGTHS = [1 << 14, 1 << 16, 1 << 22, 1 << 20]
"""Floats of four layers: 20.3 MiB, of which the third has 16."""

REVERSED = [3, 2, 1, 0]

HIDES = Computing((0.0, 0.01, 0.05, 0.055), (0.12, 0.1, 0.08, 0.07), 0.12)
"""The layers are computed one after another, 120 ms in all; the large one is needed late."""

AT_ONCE = Computing((0.0,) * 4, (0.12,) * 4, 0.12)
"""Nothing can be hidden."""

FAST, SLOW = Cost(1e-4, 1e-9), Cost(1e-4, 5e-9)
"""A GB in a second, and a fifth of it: 21 and 107 ms for all."""


class Memory:
    """Room is not needed: only what would lie where."""

    def __init__(self) -> None:
        self.parameters = [torch.empty(length, device="meta") for length in LENGTHS]

    def plan(self, order: Sequence[int], largest: int) -> list[Bucket]:
        stretches = plan_memory([(length, torch.float32) for length in LENGTHS], order, largest).stretches
        return [Bucket(one.nbytes, one.parameters) for one in stretches]


class Ranks:
    """Ranks that are all alike, but that rank 0 may say something else."""

    def __init__(self, size: int = 2, rank: int = 0, said: list[int] | None = None) -> None:
        self.size, self.rank, self.said = size, rank, said

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.said is None else torch.tensor(self.said)

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor if op == "maximum" else tensor * self.size


class Measured:
    """What steps show."""

    def __init__(self, shows: Computing, cost: Cost) -> None:
        self.shows, self.cost = shows, cost
        self.exchanged: list[int] = []
        """The bytes of each exchange that was asked for."""
        self.tuning: Any = None

    def exchanges(self, world: Ranks, keys: Sequence[int]) -> list[float]:
        buckets = Memory().plan(self.tuning.order, self.tuning.setting.bucket_bytes)
        sizes = [buckets[key - 1].nbytes for key in keys]
        self.exchanged += sizes
        return [self.cost.seconds(nbytes) for nbytes in sizes]

    def computing(self, world: Ranks, nbytes: int) -> Computing:
        assert nbytes >= 4 * sum(LENGTHS)
        return self.shows


class Course(NamedTuple):
    """What became of a Tuning."""

    tuning: Tuning
    settings: list[Setting]
    """Of each step."""
    said: list[str]
    measured: Measured

    @property
    def tried(self) -> list[str]:
        """The overlaps in whose trials the clock counted, in their order, and then that which stayed."""
        names = [setting.overlap for setting in self.settings[5:]]
        return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


Tune = Callable[..., Course]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Drives a Tuning through 40 steps; steps take what `takes` says, by a clock that is made up."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def course(
        overlap: str = "auto",
        bucket_bytes: int | None = None,
        ranks: Ranks | None = None,
        shows: Computing = HIDES,
        cost: Cost = FAST,
        deferred: bool = True,
        came: Sequence[int] = REVERSED,
        takes: Callable[[Setting], float] = lambda _: 0.1,
    ) -> Course:
        measured, said, settings = Measured(shows, cost), list[str](), list[Setting]()
        rule = BSP(Exchange(bucket_bytes=bucket_bytes), overlap)
        tuning = Tuning(Memory(), ranks or Ranks(), measured, rule)
        measured.tuning, tuning.say = tuning, said.append
        before = tuning.setting, tuning.order
        for _ in range(40):
            if not tuning.next_step(deferred):
                assert (tuning.setting, tuning.order) == before
            before = tuning.setting, tuning.order
            settings.append(tuning.setting)
            now[0] += takes(tuning.setting)
            tuning.came(came)
        return Course(tuning, settings, said, measured)

    return course


def fresh(overlap: str = "auto", bucket_bytes: int | None = None, size: int = 2) -> Tuning:
    rule = BSP(Exchange(bucket_bytes=bucket_bytes), overlap)
    return Tuning(Memory(), Ranks(size), Measured(HIDES, FAST), rule)


def test_the_first_steps_are_as_the_picture_says(tune: Tune) -> None:
    course = tune()
    assert course.settings[0] == Setting("chain", FIRST, ())
    assert course.settings[1:3] == [Setting("chain", SMALL, ())] * 2
    assert course.settings[3:5] == [Setting("chain", LARGE, ())] * 2
    for size in (SMALL, LARGE):
        assert {bucket.nbytes for bucket in Memory().plan(REVERSED, size)} <= set(course.measured.exchanged)


@pytest.mark.parametrize("overlap", ["auto", *OVERLAPS])
@pytest.mark.parametrize("bucket_bytes", [None, 3 << 20])
def test_the_order_that_came_in_the_first_step_is_taken(tune: Tune, overlap: str, bucket_bytes: int | None) -> None:
    assert fresh(overlap, bucket_bytes).order == REVERSED
    assert tune(overlap, bucket_bytes, came=[3, 1, 0, 2]).tuning.order == [3, 1, 0, 2]


def test_the_order_is_rank_0s(tune: Tune) -> None:
    assert tune(ranks=Ranks(said=[2, 0, 1, 3]), came=[3, 1, 0, 2]).tuning.order == [2, 0, 1, 3]


@pytest.mark.parametrize(
    ("overlap", "deferred"),
    [("chain", False), *((name, deferred) for name in ("funnel", "concurrent", "none") for deferred in (True, False))],
)
def test_what_is_given_is_all_that_is_tried(tune: Tune, overlap: str, deferred: bool) -> None:
    course = tune(overlap, 1 << 20, deferred=deferred)
    assert set(course.settings) == {Setting(overlap, 1 << 20, ())}
    assert course.tuning.state() is not None
    assert course.said == []
    assert course.measured.exchanged == []


def test_of_a_given_chain_only_the_order_of_exchange_is_found(tune: Tune) -> None:
    course = tune("chain", 1 << 20, cost=SLOW)
    assert {setting[:2] for setting in course.settings} == {("chain", 1 << 20)}
    order = course.tuning.setting.sequence
    assert sorted(order) == list(range(len(Memory().plan(REVERSED, 1 << 20))))
    assert list(order) != sorted(order)


@pytest.mark.parametrize("overlap", list(OVERLAPS))
def test_of_a_given_overlap_the_size_is_found(tune: Tune, overlap: str) -> None:
    course = tune(overlap)
    assert course.tuning.setting.overlap == overlap
    assert course.tuning.setting.bucket_bytes in SIZES
    assert course.tried == [overlap]
    assert course.said[0].startswith((f"overlap {overlap}, buckets of at most ", f"overlap {overlap} ("))
    assert all(f"{name} " not in line for line in course.said for name in OVERLAPS if name != overlap)


def test_the_best_in_finer_buckets_is_taken_where_it_is_faster(tune: Tune) -> None:
    """A prediction does not know how long exchanges hold others up."""
    best = tune("chain").tuning.setting
    course = tune("chain", takes=lambda setting: 0.2 if setting.bucket_bytes == best.bucket_bytes else 0.1)
    assert course.tuning.setting.bucket_bytes == best.bucket_bytes // FINER
    size = f"chain of {best.bucket_bytes / (1 << 20):g} MiB"
    assert size in course.said[1]
    assert "(measured 200.0 ms)" in course.said[1]


def test_of_given_buckets_the_overlap_is_found(tune: Tune) -> None:
    course = tune(bucket_bytes=3 << 20, cost=SLOW)
    assert {setting.bucket_bytes for setting in course.settings} == {3 << 20}
    assert course.tuning.setting.overlap == "chain"
    assert set(course.measured.exchanged) == {bucket.nbytes for bucket in Memory().plan(REVERSED, 3 << 20)}


def test_what_is_predicted_to_be_far_off_is_not_tried(tune: Tune) -> None:
    course = tune(cost=SLOW)
    assert course.tried == ["chain"]
    first, others = course.said
    assert first.startswith("overlap chain, buckets of at most ")
    assert "100.0 ms a step (predicted " in first
    assert first.endswith("at 200 MB/s")
    assert others.startswith("the others as predicted: ")
    assert all(f"{name} " in others for name in ("none", "funnel", "concurrent"))
    assert re.search(r"(none|funnel|concurrent) [\d.]+ ms \(measured", others) is None


def test_of_what_is_near_the_fastest_by_the_clock_is_taken(tune: Tune) -> None:
    """Nothing can be hidden, so that all are predicted alike; steps show what is so."""
    seconds = {"none": 0.2, "chain": 0.3, "funnel": 0.15, "concurrent": 0.4}
    course = tune(shows=AT_ONCE, takes=lambda setting: seconds[setting.overlap])
    assert course.tried == ["none", "chain", "funnel", "concurrent", "funnel"]
    assert course.settings[5 : 5 + 4 * (TRIALS + 1)].count(course.tuning.setting) == TRIALS + 1
    assert "overlap funnel" in course.said[0]
    assert "150.0 ms a step" in course.said[0]
    assert all(f"(measured {seconds[name] * 1e3:.1f} ms)" in course.said[1] for name in ("none", "chain", "concurrent"))


def test_a_trials_first_step_and_one_hiccup_do_not_count(tune: Tune) -> None:
    steps = dict.fromkeys(OVERLAPS, 0)

    def takes(setting: Setting) -> float:
        steps[setting.overlap] += 1
        if setting.overlap != "funnel":
            return 0.2
        return {1: 100.0, 3: 50.0}.get(steps["funnel"], 0.19)

    assert tune(shows=AT_ONCE, takes=takes).tuning.setting.overlap == "funnel"


def test_the_slowest_rank_decides(tune: Tune) -> None:
    """Another rank takes a second for each step of this rank's fastest."""

    class Uneven(Ranks):
        def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
            return torch.where(tensor < 0.15, 1.0, tensor) if op == "maximum" else super().allreduce(tensor, op)

    seconds = {"none": 0.3, "chain": 0.1, "funnel": 0.2, "concurrent": 0.4}
    course = tune(ranks=Uneven(), shows=AT_ONCE, takes=lambda setting: seconds[setting.overlap])
    assert course.tuning.setting.overlap == "funnel"


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("shows", [HIDES, AT_ONCE])
@pytest.mark.parametrize("cost", [FAST, SLOW, Cost(0.0, 0.0)])
def test_it_comes_to_an_end_and_says_so_on_rank_0(tune: Tune, shows: Computing, cost: Cost, deferred: bool) -> None:
    course = tune(shows=shows, cost=cost, deferred=deferred)
    assert course.tuning.setting.overlap in OVERLAPS
    assert course.tuning.setting.bucket_bytes in SIZES
    assert set(course.settings[-15:]) == {course.tuning.setting}
    assert len(course.said) == 2
    other = tune(ranks=Ranks(rank=1), shows=shows, cost=cost, deferred=deferred)
    assert other.settings == course.settings
    assert other.said == []


def test_a_rank_alone_has_nothing_to_find(tune: Tune) -> None:
    course = tune(ranks=Ranks(1))
    assert set(course.settings) == {Setting("none", FIRST, ())}
    assert course.said == []
    assert fresh("concurrent", 5, size=1).setting == Setting("concurrent", 5, ())


def test_an_overlap_that_there_is_not() -> None:
    with pytest.raises(UsageError, match=r"no overlap 'chains'; there are auto, .*chain"):
        fresh("chains")


def test_what_was_found_is_taken_up_again(tune: Tune) -> None:
    found = tune(came=[3, 1, 0, 2], cost=SLOW).tuning
    assert found.setting.sequence
    again = fresh()
    assert again.restore(json.loads(json.dumps(found.state())))
    assert (again.setting, again.order) == (found.setting, [3, 1, 0, 2])
    assert again.state() == found.state()
    assert not any(again.next_step(deferred=True) for _ in range(40))
    assert again.setting == found.setting


def test_what_is_not_found_yet_is_not_told() -> None:
    tuning = fresh()
    assert tuning.state() is None
    tuning.next_step(deferred=True)
    assert tuning.state() is None


def test_what_does_not_fit_is_refused(tune: Tune) -> None:
    state = tune(cost=SLOW).tuning.state()
    refuse = [
        (fresh(size=3), state),
        (fresh(size=1), state),
        (fresh("funnel"), state),
        (fresh(bucket_bytes=12345), state),
        (fresh(), {**state, "order": [0, 1, 2]}),
    ]
    for tuning, given in refuse:
        before = tuning.setting, list(tuning.order)
        assert not tuning.restore(given)
        assert (tuning.setting, tuning.order) == before
    assert fresh("chain").restore(state)
    assert fresh(bucket_bytes=state["setting"][1]).restore(state)
