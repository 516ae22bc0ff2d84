"""A Tuning, driven step by step with simulated ranks, exchanges and clock."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from math import isnan, nan
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from unisono.engine import OperationSpan
from unisono.errors import UsageError
from unisono.placement import Partition
from unisono.plan.bucket_layout import plan_memory
from unisono.plan.choose import BUCKET_SIZES, INITIAL_BUCKET_BYTES, MEASURED_BUCKET_BYTES, Setting
from unisono.plan.trials import ROUND_STEPS, steps_per_trial
from unisono.processor import Counters
from unisono.reducer import tuning as module
from unisono.reducer.tuning import StepTimes, Tuning
from unisono.rules import BSP, BaseRule, DiLoCo, Exchange, Sharded
from unisono.step import operations
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Bucket, Layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.program import Step, Task

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
    """Memory that only plans buckets, without allocating."""

    def __init__(self) -> None:
        self.parameters = [torch.empty(length, device="meta") for length in LENGTHS]

    def plan(self, order: Sequence[int], largest: int, end_ratio: int = 1) -> list[Bucket]:
        buckets = plan_memory([(length, torch.float32) for length in LENGTHS], order, largest, (), end_ratio).buckets
        return [Bucket(bucket.nbytes, bucket.parameters) for bucket in buckets]


class Ranks:
    """World of equal ranks; `said` replaces what rank 0 broadcasts."""

    def __init__(self, size: int = 2, rank: int = 0, said: list[int] | None = None, nodes: int = 2) -> None:
        self.size, self.rank, self.said, self.nodes = size, rank, said, nodes
        self.use = Counters("", 1.0, 1.0, 0.0, 0, {0: (1.0, 0.0)})

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.said is None else torch.tensor(self.said)

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor if op == "maximum" else tensor * self.size

    def all_gather_object(self, use: Counters) -> list[Counters]:
        """Return the use of cores that is simulated, in place of this process's."""
        return [self.use]


class Measured:
    """Step times with given results."""

    def __init__(self, shows: Computing, cost: Cost, sharded: bool = False) -> None:
        self.shows, self.cost, self.sharded = shows, cost, sharded
        self.exchanged: list[int] = []
        """The bytes of each exchange that was asked for."""
        self.tuning: Any = None

    def exchange_seconds(self, world: Ranks, keys: Sequence[int]) -> list[float]:
        buckets = Memory().plan(self.tuning.order, self.tuning.setting.bucket_bytes)
        sizes = [buckets[key - 1].nbytes for key in keys]
        self.exchanged += sizes
        return [self.cost.seconds(nbytes) for nbytes in sizes]

    def forget_local(self) -> None:
        """Forget nothing: these times are given."""

    def computing(self, world: Ranks, nbytes: float, updated: float) -> Computing:
        assert nbytes >= 4 * sum(LENGTHS)
        assert updated == pytest.approx(nbytes / (world.size if self.sharded else 1))
        return self.shows


class Course(NamedTuple):
    """Steps of a Tuning."""

    tuning: Tuning
    settings: list[Setting]
    """Of each step."""
    said: list[str]
    measured: Measured

    @property
    def tried(self) -> list[str]:
        """Overlaps that were tried, in order, then the chosen one."""
        names = [setting.overlap for setting in self.settings[5:]]
        return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


Tune = Callable[..., Course]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Drive a Tuning through some steps; a step takes `takes(setting)` seconds on a simulated clock."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def course(
        overlap: str = "auto",
        bucket_bytes: int | None = None,
        ranks: Ranks | None = None,
        shows: Computing = HIDES,
        cost: Cost = FAST,
        deferred: bool = True,
        order: Sequence[int] = REVERSED,
        takes: Callable[[Setting], float] = lambda _: 0.1,
        kind: type[BaseRule] = BSP,
        placed: Partition = (),
        steps: int = 60,
    ) -> Course:
        measured, said, settings = Measured(shows, cost, kind is Sharded), list[str](), list[Setting]()
        rule = kind(Exchange(bucket_bytes=bucket_bytes), overlap)
        tuning = Tuning(Memory(), ranks or Ranks(), measured, rule, placed)
        measured.tuning, tuning.log = tuning, said.append
        before = tuning.setting, tuning.order
        for _ in range(steps):
            if not tuning.next_step(deferred):
                assert (tuning.setting, tuning.order) == before
            before = tuning.setting, tuning.order
            settings.append(tuning.setting)
            now[0] += takes(tuning.setting)
            tuning.recorded_order = order
        return Course(tuning, settings, said, measured)

    return course


def fresh(
    overlap: str = "auto",
    bucket_bytes: int | None = None,
    size: int = 2,
    kind: type[BaseRule] = BSP,
    nodes: int = 2,
) -> Tuning:
    rule = kind(Exchange(bucket_bytes=bucket_bytes), overlap)
    return Tuning(Memory(), Ranks(size, nodes=nodes), Measured(HIDES, FAST), rule)


def fresh_after(state: dict[str, Any], steps: int) -> Tuning:
    """Return a Tuning that has gone on with a state for so many steps."""
    tuning = fresh()
    assert tuning.restore(json.loads(json.dumps(state)))
    for _ in range(steps):
        tuning.next_step(deferred=True)
    return tuning


def test_the_first_steps_follow_the_plan(tune: Tune) -> None:
    course = tune()
    assert course.settings[0] == Setting("chain", INITIAL_BUCKET_BYTES, ())
    assert course.settings[1:3] == [Setting("chain", MEASURED_BUCKET_BYTES[0], ())] * 2
    assert course.settings[3:5] == [Setting("chain", MEASURED_BUCKET_BYTES[1], ())] * 2
    for size in MEASURED_BUCKET_BYTES:
        assert {bucket.nbytes for bucket in Memory().plan(REVERSED, size)} <= set(course.measured.exchanged)


def test_a_setting_whose_passes_have_failed_is_tried_again(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have exchanged nothing, so times are missing."""
    times, world = StepTimes(4), Ranks()
    for key in (1, 2):
        times.observe(OperationSpan("", "", "", 0.0, 0.5, Task(operations.NODE_SUM, key, "")))
    assert times.exchange_seconds(world, (1, 2)) == [0.5, 0.5]
    assert isnan(sum(times.exchange_seconds(world, (1, 2))))
    known, asked = Measured.exchange_seconds, itertools.count()

    def after_two(self: Measured, world: Ranks, keys: Sequence[int]) -> list[float]:
        return [nan] if next(asked) < 2 else known(self, world, keys)

    monkeypatch.setattr(Measured, "exchange_seconds", after_two)
    assert tune().settings[1:5] == [Setting("chain", MEASURED_BUCKET_BYTES[0], ())] * 4


@pytest.mark.parametrize("kind", [BSP, Sharded])
def test_packing_updates_and_copies_are_predicted_as_they_were_measured(
    kind: type[BaseRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last step alone: there are fewer tasks than in those before it, whose buckets are smaller."""
    seconds, computed = {"pack": 0.1, "update": 0.2, "set_grads": 0.4, "unpack": 0.4}, list[Computing]()
    times, world, rule = StepTimes(4), Ranks(), kind(overlap="chain")
    tuning = Tuning(Memory(), world, times, kind())
    monkeypatch.setattr(tuning, "_try", lambda computing, *_: computed.append(computing) or iter(()))
    for _ in range(5):
        tuning.next_step(deferred=True)
        layout = Layout(world.size, 4, tuple(Memory().plan(tuning.order, tuning.setting.bucket_bytes)))
        program = rule(Step(0), 0, layout)
        for task in program:
            times.observe(OperationSpan("", "", "", 0.0, seconds.get(task.operation.name, 1e-3), task))
    tuning.next_step(deferred=True)
    costs = Costs(layout, computed[0], FAST)
    for name, each in seconds.items():
        tasks = [task for task in program if task.operation.name == name]
        predicted = sum(task.operation.price(task, costs).seconds for task in tasks)
        assert predicted == pytest.approx(each * len(tasks)), name


@pytest.mark.parametrize("overlap", ["auto", *OVERLAPS])
@pytest.mark.parametrize("bucket_bytes", [None, 3 << 20])
def test_the_order_of_the_first_step_is_used(tune: Tune, overlap: str, bucket_bytes: int | None) -> None:
    assert fresh(overlap, bucket_bytes).order == REVERSED
    assert tune(overlap, bucket_bytes, order=[3, 1, 0, 2]).tuning.order == [3, 1, 0, 2]


def test_the_order_is_rank_0s(tune: Tune) -> None:
    assert tune(ranks=Ranks(said=[2, 0, 1, 3]), order=[3, 1, 0, 2]).tuning.order == [2, 0, 1, 3]


@pytest.mark.parametrize(
    ("overlap", "deferred"),
    [("chain", False), *((name, deferred) for name in ("funnel", "concurrent", "none") for deferred in (True, False))],
)
def test_only_given_options_are_tried(tune: Tune, overlap: str, deferred: bool) -> None:
    course = tune(overlap, 1 << 20, deferred=deferred)
    assert set(course.settings) == {Setting(overlap, 1 << 20, ())}
    assert course.tuning.state() is not None
    assert course.said == []
    assert course.measured.exchanged == []


@pytest.mark.parametrize("overlap", ["chain", "phases"])
def test_a_given_chain_searches_only_the_order(tune: Tune, overlap: str) -> None:
    course = tune(overlap, 1 << 20, cost=SLOW)
    assert {setting[:2] for setting in course.settings} <= {("chain", 1 << 20), (overlap, 1 << 20)}
    assert course.tuning.setting.overlap == overlap
    order = course.tuning.setting.sequence
    assert sorted(order) == list(range(len(Memory().plan(REVERSED, 1 << 20))))
    assert list(order) != sorted(order)


@pytest.mark.parametrize("overlap", list(OVERLAPS))
def test_a_given_overlap_searches_the_bucket_size(tune: Tune, overlap: str) -> None:
    course = tune(overlap)
    assert course.tuning.setting.overlap == overlap
    assert course.tuning.setting.bucket_bytes in BUCKET_SIZES
    assert course.tried == [overlap]
    assert course.said[0].startswith((f"overlap {overlap}, buckets of at most ", f"overlap {overlap} ("))
    assert all(f"{name} " not in line for line in course.said for name in OVERLAPS if name != overlap)


@pytest.mark.parametrize("coarser", [False, True])
def test_other_buckets_are_chosen_if_they_are_faster(tune: Tune, coarser: bool) -> None:
    """A prediction does not know how long exchanges hold others up, nor what a bucket costs where ranks share cores."""
    cost = Cost(1e-6, 5e-9) if coarser else FAST
    best = tune("chain", cost=cost).tuning.setting
    course = tune("chain", cost=cost, takes=lambda setting: 0.2 if setting.bucket_bytes == best.bucket_bytes else 0.1)
    assert course.tuning.setting.bucket_bytes == (best.bucket_bytes * 4 if coarser else best.bucket_bytes // 4)
    size = f"chain of {best.bucket_bytes / (1 << 20):g} MiB"
    assert size in course.said[1]
    assert "(measured 200.0 ms)" in course.said[1]


def test_given_buckets_search_the_overlap(tune: Tune) -> None:
    course = tune(bucket_bytes=3 << 20, cost=SLOW)
    assert {setting.bucket_bytes for setting in course.settings} == {3 << 20}
    assert course.tuning.setting.overlap == "chain"
    assert set(course.measured.exchanged) == {bucket.nbytes for bucket in Memory().plan(REVERSED, 3 << 20)}


def test_settings_predicted_to_be_slow_are_not_tried(tune: Tune) -> None:
    course = tune(cost=SLOW)
    assert course.tried == ["chain"]
    first, others = course.said
    assert first.startswith("overlap chain, buckets of at most ")
    assert "100.0 ms a step (predicted " in first
    assert first.endswith("at 200 MB/s")
    assert others.startswith("the others as predicted: ")
    assert all(f"{name} " in others for name in ("none", "funnel", "concurrent"))
    assert re.search(r"(none|funnel|concurrent) [\d.]+ ms \(measured", others) is None


def test_entries_that_differ_in_their_buckets_name_them(tune: Tune) -> None:
    """The setting that is chosen, a funnel, is not one of them."""
    course = tune(takes=lambda setting: 0.05 if setting.overlap == "funnel" else 0.1)
    assert "overlap funnel" in course.said[0]
    entries = course.said[1].removeprefix("the others as predicted: ").split(", ")
    chains = [entry for entry in entries if entry.startswith("chain")]
    assert len(chains) > 1
    assert all(re.match(r"chain of [\d.]+ MiB", entry) for entry in chains), chains
    assert len({re.sub(r" [\d.]+ ms.*", "", entry) for entry in entries}) == len(entries)


def test_the_fastest_measured_setting_near_the_best_is_chosen(tune: Tune) -> None:
    """Nothing can be hidden, so that all are predicted alike; steps show what is so."""
    seconds = {"none": 0.2, "chain": 0.3, "funnel": 0.15, "concurrent": 0.4}
    course = tune(shows=AT_ONCE, takes=lambda setting: seconds[setting.overlap])
    assert course.tried == ["none", "chain", "funnel", "concurrent", "funnel"]
    steps = 1 + steps_per_trial(course.tuning.chosen.prediction.step)
    assert course.settings[5 : 5 + 4 * steps].count(course.tuning.setting) == steps
    assert "overlap funnel" in course.said[0]
    assert "150.0 ms a step" in course.said[0]
    assert all(f"(measured {seconds[name] * 1e3:.1f} ms)" in course.said[1] for name in ("none", "chain", "concurrent"))


def test_the_first_step_of_a_trial_and_one_outlier_do_not_count(tune: Tune) -> None:
    steps = dict.fromkeys(OVERLAPS, 0)

    def takes(setting: Setting) -> float:
        steps[setting.overlap] += 1
        if setting.overlap != "funnel":
            return 0.2
        return {1: 100.0, 3: 50.0}.get(steps["funnel"], 0.19)

    assert tune(shows=AT_ONCE, takes=takes).tuning.setting.overlap == "funnel"


def test_rivals_are_tried_again_by_turns_as_the_run_goes_on(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second of the first steps takes a third longer, by which no setting is clearly faster than the first."""
    monkeypatch.setattr(module, "STEPS_BETWEEN_ROUNDS", 5)
    seconds, steps = {"none": 0.024, "chain": 0.021, "funnel": 0.03}, list[str]()

    def takes(setting: Setting) -> float:
        steps.append(setting.overlap)
        return seconds.get(setting.overlap, 0.05) * (1.4 if len(steps) < 26 and len(steps) % 2 else 1.0)

    course = tune(shows=AT_ONCE, takes=takes, steps=200)
    assert course.tried[:5] == ["none", "chain", "funnel", "concurrent", "none"]
    later = ["none", *["chain", "funnel", "none"], *["chain", "funnel", "chain"], *["none", "chain"] * 2]
    assert course.tried[4:] == later, "the slowest rival is tried twice, the others four times"
    assert steps.count("funnel") == 1 + steps_per_trial(0.12) + 2 * (1 + ROUND_STEPS)
    assert "overlap none, buckets of at most" in course.said[2], "one round decides nothing"
    assert "overlap chain, buckets of at most" in course.said[3]
    assert re.search(r"from here on: none of .* 24.0 ms, chain of .* 21.0 ms, funnel of .* 30.0 ms", course.said[3])
    assert course.tuning.state()["setting"][0] == "chain"


def test_a_run_that_resumes_goes_on_with_its_rivals(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept in the middle of a trial is the setting that was kept before it."""
    monkeypatch.setattr(module, "STEPS_BETWEEN_ROUNDS", 5)
    seconds, wild = {"none": 0.1, "chain": 0.102}, itertools.count()

    def takes(setting: Setting) -> float:
        return seconds.get(setting.overlap, 0.2) * (1.0, 1.15)[next(wild) % 2]

    for steps in range(28, 45):
        state = tune(shows=AT_ONCE, takes=takes, steps=steps).tuning.state()
        assert state["setting"][0] == "none"
        assert [rival[0][0] for rival in state["rivals"]] == ["none", "chain"]
        again = fresh()
        assert again.restore(json.loads(json.dumps(state)))
        assert again.state() == state
        used = [again.setting.overlap for _ in range(60) if again.next_step(deferred=True)]
        assert used[:2] == ["chain", "none"]
        others = fresh("none"), fresh(kind=DiLoCo)
        assert [other.restore(json.loads(json.dumps(state))) for other in others] == [True, True]
        for other in others:  # an overlap that was given since then, and a rule whose steps are not alike
            assert not any(other.next_step(deferred=True) for _ in range(60))


def test_steps_before_a_checkpoint_count_for_the_next_round(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations of an elastic run may be shorter than the steps between two rounds."""
    monkeypatch.setattr(module, "STEPS_BETWEEN_ROUNDS", 50)
    seconds, wild = {"none": 0.1, "chain": 0.102}, itertools.count()
    takes = lambda setting: seconds.get(setting.overlap, 0.2) * (1.0, 1.15)[next(wild) % 2]  # noqa: E731
    state = tune(shows=AT_ONCE, takes=takes, steps=50).tuning.state()
    begun = next(count for count in range(100) if fresh_after(state, count).setting.overlap == "chain")
    assert 25 < begun < 45, "of 50 steps some were made before"


def test_trials_on_shared_cores_keep_the_simplest_setting(tune: Tune) -> None:
    """Steps without overlap are clearly faster, but others took half of the ranks' cores."""
    seconds = {"none": 0.1, "chain": 0.3, "funnel": 0.2, "concurrent": 0.4}
    ranks = Ranks()
    ranks.use = ranks.use._replace(cpu=0.5, delayed=0.5)
    course = tune(ranks=ranks, shows=AT_ONCE, takes=lambda setting: seconds[setting.overlap])
    setting, choice = course.tuning.setting, course.tuning.choice
    assert (setting.overlap, setting.end_ratio) == ("chain", 1)
    assert choice is not None
    assert choice.candidate.setting == setting
    assert course.said[1].startswith("other processes took 49% of the ranks' cores: trials decide nothing")
    alone = tune(shows=AT_ONCE, takes=lambda setting: seconds[setting.overlap])
    assert (alone.tuning.setting.overlap, len(alone.said)) == ("none", 2)


def test_wild_trials_keep_the_simplest_setting(tune: Tune) -> None:
    """The steps of a setting differ by half, the settings by less."""
    wild = itertools.count()
    course = tune(shows=AT_ONCE, takes=lambda setting: (0.1, 0.15)[next(wild) % 2])
    assert course.tuning.setting.overlap == "chain"
    assert "the steps of one setting differ by 50%, the settings by 0%: trials decide nothing" in course.said[1]


@pytest.mark.parametrize("nodes", [1, 2])
def test_buckets_are_small_at_both_ends_between_nodes_alone(tune: Tune, nodes: int) -> None:
    course = tune("chain", ranks=Ranks(nodes=nodes), cost=Cost(4e-3, 5e-9))
    assert any(setting.end_ratio > 1 for setting in course.settings) is (nodes == 2)
    assert (course.tuning.setting.end_ratio > 1) is (nodes == 2)


def test_small_buckets_at_both_ends_of_an_earlier_release_are_searched_again_on_one_node(tune: Tune) -> None:
    state = tune("chain", cost=Cost(4e-3, 5e-9)).tuning.state()
    assert state is not None
    again = fresh("chain", nodes=1)
    assert not again.restore(state)
    assert fresh("chain").restore(state)


@pytest.mark.parametrize(("threads", "overlap"), [(1, "chain"), (2, "none")])
def test_ranks_that_compute_on_all_cores_send_nothing_meanwhile(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, threads: int, overlap: str
) -> None:
    """A chain is predicted to be faster, but here all settings take as long."""
    monkeypatch.setattr(module, "HOST", "meta")
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "os", SimpleNamespace(cpu_count=lambda: 4))
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    assert tune(ranks=Ranks(nodes=1), cost=SLOW).tuning.setting.overlap == overlap


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
def test_the_search_ends_and_rank_0_logs_the_choice(tune: Tune, shows: Computing, cost: Cost, deferred: bool) -> None:
    course = tune(shows=shows, cost=cost, deferred=deferred)
    assert course.tuning.setting.overlap in OVERLAPS
    assert course.tuning.setting.bucket_bytes in BUCKET_SIZES
    assert set(course.settings[-15:]) == {course.tuning.setting}
    assert len(course.said) == 2
    other = tune(ranks=Ranks(rank=1), shows=shows, cost=cost, deferred=deferred)
    assert other.settings == course.settings
    assert other.said == []


def test_a_single_rank_has_nothing_to_search(tune: Tune) -> None:
    course = tune(ranks=Ranks(1))
    assert set(course.settings) == {Setting("none", INITIAL_BUCKET_BYTES, ())}
    assert course.said == []
    assert fresh("concurrent", 5, size=1).setting == Setting("concurrent", 5, ())


def test_an_unknown_overlap() -> None:
    with pytest.raises(UsageError, match=r"no overlap 'chains'; there are auto, .*chain"):
        fresh("chains")


def test_a_stored_result_is_restored(tune: Tune) -> None:
    tuning = tune(order=[3, 1, 0, 2], cost=SLOW).tuning
    assert tuning.setting.sequence
    again = fresh()
    assert again.restore(json.loads(json.dumps(tuning.state())))
    assert (again.setting, again.order) == (tuning.setting, [3, 1, 0, 2])
    assert again.state() == tuning.state()
    assert not any(again.next_step(deferred=True) for _ in range(40))
    assert again.setting == tuning.setting


def test_overlaps_that_take_longer_than_predicted_give_way_to_one_that_was_predicted_slower(tune: Tune) -> None:
    """Nothing is hidden where computing and exchanges share cores; "none" is predicted far from the best."""
    calm = tune(cost=SLOW)
    assert "none" not in calm.tried
    course = tune(cost=SLOW, takes=lambda setting: 0.25 if setting.overlap == "none" else 0.5)
    assert course.tuning.setting.overlap == "none"


def test_results_with_other_numbers_of_ranks_are_kept(tune: Tune) -> None:
    """A run that loses a rank, and gets it back, does not search again."""
    tuning = tune(order=[3, 1, 0, 2], cost=SLOW).tuning
    fewer = fresh(size=3)
    assert not fewer.restore(json.loads(json.dumps(tuning.state())))
    assert not fewer.finished
    again = fresh()
    assert again.restore(json.loads(json.dumps(fewer.state()))), "the search with 3 ranks has not ended"
    assert (again.setting, again.order) == (tuning.setting, tuning.order)
    fewer.finished = True
    back = fresh()
    assert back.restore(json.loads(json.dumps(fewer.state())))
    assert back.setting == tuning.setting
    third = fresh(size=3)
    assert third.restore(json.loads(json.dumps(back.state())))
    assert third.setting == fewer.setting
    state = third.state()
    for size in [2, 3] * 5:  # it does not grow
        turn = fresh(size=size)
        assert turn.restore(json.loads(json.dumps(state)))
        state = turn.state()
    assert len(json.dumps(state)) == len(json.dumps(third.state()))


def test_no_state_before_the_search_has_ended() -> None:
    tuning = fresh()
    assert tuning.state() is None
    tuning.next_step(deferred=True)
    assert tuning.state() is None


def test_parts_of_the_wrong_length_are_refused(tune: Tune) -> None:
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
    alike = tune(bucket_bytes=1 << 20, cost=SLOW).tuning.state()
    assert alike is not None
    assert fresh(bucket_bytes=1 << 20).restore(alike)


def test_equal_buckets_are_chosen_if_they_are_faster(tune: Tune) -> None:
    """A prediction knows nothing of the work beside a collective."""
    cost = Cost(4e-3, 5e-9)
    best = tune("chain", cost=cost).tuning.setting
    assert best.end_ratio > 1
    course = tune("chain", cost=cost, takes=lambda setting: 0.1 if setting.end_ratio == 1 else 0.2)
    assert course.tuning.setting.end_ratio == 1
    assert course.tuning.setting in course.settings[5:-1]


def test_the_ratio_of_buckets_at_both_ends_is_stored_and_restored(tune: Tune) -> None:
    course = tune(cost=Cost(4e-3, 5e-9))
    tuning = course.tuning
    assert tuning.setting.end_ratio > 1
    smallest = tuning.setting.bucket_bytes / tuning.setting.end_ratio / (1 << 20)
    assert f"MiB ({smallest:g} at both ends): " in course.said[0]
    state = json.loads(json.dumps(tuning.state()))
    again = fresh()
    assert again.restore(state)
    assert again.setting == tuning.setting
    assert not fresh(bucket_bytes=tuning.setting.bucket_bytes).restore(state), "a given size is that of all buckets"
    state["setting"][5] = 3
    assert not fresh().restore(state)


def test_a_result_of_earlier_versions_has_equal_buckets(tune: Tune) -> None:
    tuning = tune(bucket_bytes=1 << 20).tuning
    state = json.loads(json.dumps(tuning.state()))
    again = fresh(bucket_bytes=1 << 20)
    assert again.restore({**state, "setting": state["setting"][:5]})
    assert again.setting == tuning.setting._replace(end_ratio=1)


def test_halves_are_stored_and_restored(tune: Tune) -> None:
    tuning = tune(cost=SLOW, kind=Sharded).tuning
    assert tuning.setting.halves
    again = fresh(kind=Sharded)
    state = json.loads(json.dumps(tuning.state()))
    assert again.restore(state)
    assert again.setting == tuning.setting
    state["setting"][4] = state["setting"][4][:-1]
    assert not fresh(kind=Sharded).restore(state)
