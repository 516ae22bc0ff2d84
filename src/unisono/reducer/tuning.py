"""Search, in the first steps, for the fastest way to exchange gradients. The choice is reported.

    step 0      buckets as the parameters are declared            the order in which gradients become ready: rank 0's
    steps 1-4   in small and in large buckets, as a chain         the times of computing, exchanges and updates
                predict every overlap and bucket size            plan/choose.py
    then        the best of each overlap within 15% of the best   5 to 7 steps each, all but the first are measured
                and the very best in finer, coarser and equal buckets
                others that are predicted faster than those took
    from then on the one predicted to be best, unless another was clearly faster; the simplest one where trials
                decide nothing, as when other processes take the cores      plan/trials.py, processor.py
    4 times, after 256 steps   that one and its rivals by turns, 8 steps each: the fastest of all these is kept

Where the ranks of one node compute on all of its cores, collectives have none of their own: "none" is then tried first,
and is the simplest one.

Options that are given are not searched. All ranks see the same numbers, so they make the same plan.

The times of steps, of this rank and as means over ranks, are those of `StepTimes`.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from math import isnan, nan
from statistics import mean, median
from typing import Any

import torch

from unisono.engine import OperationSpan
from unisono.engine.communicator_pool import ModelCollectives
from unisono.errors import UsageError
from unisono.launch import cores
from unisono.placement import Partition
from unisono.plan.choose import (
    MEASURED_BUCKET_BYTES,
    Candidate,
    Setting,
    candidates,
    end_ratios,
    initial_setting,
    is_searched,
    overlaps_of,
    prediction_inputs,
    sizes_of,
    variants,
)
from unisono.plan.trials import (
    MOST_ROUNDS,
    MOST_TRIAL_STEPS,
    ROUND_STEPS,
    STEPS_BETWEEN_ROUNDS,
    Trial,
    TrialChoice,
    choose,
    is_worth_trial,
    rivals,
    rivals_left,
    steps_per_trial,
)
from unisono.processor import HOST, Counters, processor_use, read_counters, use_since
from unisono.reducer.bucket_memory import BucketMemory
from unisono.rules import BaseRule
from unisono.step.costs import Computing, Cost, fit
from unisono.step.layout import Bucket
from unisono.step.operations import BARRIER
from unisono.step.overlaps import OVERLAPS, find_overlap
from unisono.step.program import Role, Task
from unisono.step.rule import AUTO, RankState
from unisono.world import World


class StepTimes:
    """Times of one rank, in seconds. The clock stands still while the rank waits."""

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self.communicating = 0.0
        """Seconds of exchanges, since the start."""
        self.updating = 0.0
        """Seconds of parameter updates, since the start."""
        self.waiting = 0.0
        """Seconds since the start in which this rank computed nothing, as it waited for an exchange or an update."""
        self._exchange_seconds: dict[int, dict[str, float]] = {}  # of the last step, by key and operation
        self._local_seconds = {name: dict[int, float]() for name in ("update", "pack", "set_grads", "unpack")}
        self._began = self.last_ready = 0.0
        self.needed = self.ready = [0.0] * parameters
        self.begin()

    def begin(self) -> None:
        """Begin a step. It may be called again before the first gradient; the times of the last step are kept."""
        if self.last_ready or not self._began:
            self._last = self.needed, self.ready, self.last_ready
        self._began = self._clock()
        self.needed = [0.0] * self._parameters
        self.ready = [0.0] * self._parameters
        self.last_ready = 0.0

    def record_read(self, index: int) -> None:
        """Record that a parameter is read. Only the first time in a step counts."""
        self.needed[index] = self.needed[index] or self._clock() - self._began

    def record_ready(self, index: int) -> None:
        """Record that a parameter's gradient is ready."""
        self.ready[index] = self.last_ready = self._clock() - self._began

    def add_waiting(self, since: float) -> None:
        """Add the time from `since` (a time.perf_counter() value) until now to the waiting time."""
        self.waiting += time.perf_counter() - since

    def observe(self, span: OperationSpan) -> None:
        """Record the duration of a task of the step program."""
        task, seconds = span.about, span.end - span.begin
        if not isinstance(task, Task):
            return
        if task.operation.name in self._local_seconds:  # an update may have an exchange within
            self.updating += seconds if task.parameters else 0.0
            self._local_seconds[task.operation.name][task.key] = seconds
        elif task.operation.role is not Role.LOCAL and task.operation is not BARRIER:
            self.communicating += seconds
            self._exchange_seconds.setdefault(task.key, {})[task.operation.name] = seconds

    def forget_local(self) -> None:
        """Forget the seconds of packing, updates and copies, which are those of other buckets from here on."""
        for seconds in self._local_seconds.values():
            seconds.clear()

    def computing(self, world: ModelCollectives | World, nbytes: float, updated: float) -> Computing:
        """Return the last step's times, mean over ranks, for `nbytes` of gradients, of which each rank has applied
        `updated`. Called by all together."""
        needed, ready, last_ready = self._last
        times = [*needed, *ready, last_ready, *(sum(seconds.values()) for seconds in self._local_seconds.values())]
        mean = (world.allreduce(torch.tensor(times, dtype=torch.float64, device="cpu")) / world.size).tolist()
        last_ready, update, pack, *back = mean[-5:]
        # a parameter without a gradient counts as ready at the end
        complete = tuple(seconds or last_ready for seconds in mean[self._parameters : -5])
        per_byte = update / updated, pack / nbytes, sum(back) / nbytes
        return Computing(tuple(mean[: self._parameters]), complete, last_ready, *per_byte)

    def exchange_seconds(self, world: ModelCollectives | World, keys: Sequence[int]) -> list[float]:
        """Return the seconds of the last step's exchange of each key, all its collectives, as the mean over ranks, and
        forget them. NaN where a rank has none: its passes have failed."""
        seconds = [sum(self._exchange_seconds.pop(key, {"": nan}).values()) for key in keys]
        local = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        return (world.allreduce(local) / world.size).tolist()

    def _clock(self) -> float:
        return time.perf_counter() - self.waiting


Log = Callable[[str], None]


class Tuning:
    """Choice of the setting of the next step. Every rank asks at each step, all together."""

    def __init__(
        self,
        memory: BucketMemory,
        world: ModelCollectives | World,
        times: StepTimes,
        rule: BaseRule,
        placed: Partition = (),
    ) -> None:
        """Keep the rule's overlap and bucket size, or search them where they are "auto" and None; `placed` are the
        ranks of each node, which may sum buckets in phases. Raises UsageError for an unknown overlap."""
        overlap = rule.overlap
        if overlap != AUTO and overlap not in OVERLAPS:
            raise UsageError(f"there is no overlap {overlap!r}; there are {AUTO}, {', '.join(OVERLAPS)}")
        self._memory, self._world, self._times, self._rule, self._placed = memory, world, times, rule, placed
        self._overlaps, self._sizes = overlaps_of(rule), sizes_of(rule)
        self.order = list(reversed(range(len(memory.parameters))))
        """Parameters in the order in which their gradients become ready."""
        self.setting = initial_setting(rule, self._buckets, world.size)
        self.log: Log = logging.getLogger("unisono").info
        """Function that rank 0 reports the choice with."""
        self.choice: TrialChoice | None = None
        """Chosen setting, with its prediction and what that is worth; None where nothing had to be predicted."""
        self.recorded_order: Sequence[int] = self.order
        """Order in which the gradients of the last step became ready; missing ones are at its end."""
        self._begins = deque[float](maxlen=1 + max(MOST_TRIAL_STEPS, ROUND_STEPS))
        self._rivals: dict[Setting, list[float]] = {}  # seconds of their steps as the run goes on; the kept one first
        self._rounds = self._steps_since = 0  # rounds of them, and steps since the last one
        self.finished = world.size == 1 or not memory.parameters or not is_searched(rule)
        """True once a setting is chosen."""
        self._search = iter(()) if self.finished else self._search_steps()
        self._other_results: list[dict[str, Any]] = []  # results of earlier searches, with other numbers of ranks
        self._deferred = False

    @property
    def chosen(self) -> Candidate | None:
        """Chosen setting with its prediction and what was played for it; None where nothing was predicted, and in
        steps with one of its rivals."""
        chosen = None if self.choice is None else self.choice.candidate
        return chosen if chosen is not None and chosen.setting == self.setting else None

    @property
    def kept(self) -> Setting:
        """Setting of the coming steps, but for trials."""
        return next(iter(self._rivals), self.setting)

    def next_step(self, deferred: bool) -> bool:
        """Begin a step, while nothing is running. Return True where there is another setting from here on.

        `deferred`: True where parameters are waited for when they are needed.
        """
        self._deferred = deferred
        self._begins.append(time.perf_counter())
        return next(self._search, False)

    def close(self) -> None:
        """End the search; its generator keeps this object alive."""
        self._search = iter(())

    def state(self) -> dict[str, Any] | None:
        """Return the result of the search, and those with other numbers of ranks, which an elastic run comes back to,
        for a run that resumes; None where there is none yet."""
        results = [*self._other_results]
        if self.finished:
            result = {"ranks": self._world.size, "order": list(self.order), "setting": list(self.kept)}
            stored = [[list(setting), steps] for setting, steps in self._rivals.items()]
            results.insert(0, {**result, "rivals": stored, "rounds": [self._rounds, self._steps_since]})
        return {**results[0], "others": results[1:]} if results else None

    def restore(self, state: dict[str, Any]) -> bool:
        """Adopt the result of an earlier run with as many ranks. Return False if there is none that applies."""
        results = [{**state, "others": ()}, *state.get("others", ())]  # older runs have no others
        self._other_results = [result for result in results if result["ranks"] != self._world.size]
        return any(self._adopt(result) for result in results)

    def _adopt(self, state: dict[str, Any]) -> bool:
        order, setting = list(state["order"]), _setting_of(state["setting"])
        alike = state["ranks"] == self._world.size and sorted(order) == sorted(self.order)
        if not alike or not self._allows(setting, order):
            return False
        stored = state.get("rivals", ()) if is_searched(self._rule) else ()  # older runs have none
        settings = {_setting_of(rival): steps for rival, steps in stored}
        self._rivals = {rival: steps for rival, steps in settings.items() if self._allows(rival, order)}
        self.order, self.setting, (self._rounds, self._steps_since) = order, setting, state.get("rounds", (0, 0))
        self._search, self.finished = self._try_rivals(), True
        return True

    def _allows(self, setting: Setting, order: Sequence[int]) -> bool:
        """Return True for a setting that the rule's options allow, for parameters that become ready in this order."""
        known = setting.overlap in self._overlaps and setting.bucket_bytes in self._sizes
        if not known or setting.end_ratio not in end_ratios(setting.overlap, self._sizes, self._world.nodes):
            return False
        buckets = range(len(self._memory.plan(order, setting.bucket_bytes, setting.end_ratio)))
        if setting.sequence and sorted(setting.sequence) != list(buckets):
            return False
        return not setting.halves or sorted(setting.halves) == sorted(2 * [bucket + 1 for bucket in buckets])

    def _search_steps(self) -> Iterator[bool]:
        """Search for the setting. Each `yield` is a step: True where its setting is not that of the last one."""
        counters = read_counters()
        yield False
        self.order = self._world.broadcast(torch.tensor(self.recorded_order, dtype=torch.int64, device="cpu")).tolist()
        own_order = self._deferred and not any(find_overlap(name).by_main for name in self._overlaps)
        if len(self._overlaps) == len(self._sizes) == 1 and not own_order:
            self.finished = True
            yield True
            return
        sizes, seconds = list[float](), list[float]()
        for size in MEASURED_BUCKET_BYTES if len(self._sizes) > 1 else self._sizes:
            self.setting = Setting("chain", size)
            yield True
            self._times.forget_local()
            yield False  # the first exchange of each length makes plans for it
            buckets = self._buckets(size, self.setting.end_ratio)
            while isnan(sum(took := self._times.exchange_seconds(self._world, range(1, len(buckets) + 1)))):
                yield False
            sizes.append(mean(bucket.nbytes for bucket in buckets))
            seconds.append(mean(took))  # the mean over buckets
        sharded, ranks = self._rule.traits.state is RankState.SHARDED, range(self._world.size)
        updated = sum(each.nbytes / (len((each.groups or (ranks,))[0]) if sharded else 1) for each in buckets)
        computing = self._times.computing(self._world, sum(bucket.nbytes for bucket in buckets), updated)
        yield from self._try(computing, fit(sizes, seconds), counters)

    def _try(self, computing: Computing, cost: Cost, counters: Counters) -> Iterator[bool]:
        """Try the settings that are predicted to be best, and choose; `counters` were read when the search began."""
        world, ranks, nodes = self._world, self._world.size, self._world.nodes
        inputs = prediction_inputs(
            self._rule, computing, cost, self._buckets, ranks, nodes, deferred=self._deferred, nodes=self._placed
        )
        ranked, simple = candidates(inputs), initial_setting(self._rule, self._buckets, ranks).overlap
        if self._computes_on_all_cores():
            simple = "none"
            ranked.sort(key=lambda candidate: candidate.setting.overlap != simple)
        best, *rest = ranked
        predicted = [best, *variants(best, inputs), *rest]
        trials, steps = list[Trial](), steps_per_trial(best.prediction.step)
        for candidate in predicted:
            if is_worth_trial(candidate, best, trials):
                trials.append(Trial(candidate, (yield from self._timed(candidate.setting, steps))))
        use = processor_use(world.all_gather_object(use_since(counters)))
        chosen, self.choice = choose(trials, simple, use)
        self._rivals = {} if use.shared else {setting: [] for setting in rivals(trials, chosen)}
        self.finished = True
        if world.rank == 0:
            for line in _report(computing, cost, chosen, self.choice.doubt, trials, predicted):
                self.log(line)
        yield self._keep(chosen.candidate.setting)
        yield from self._try_rivals()

    def _try_rivals(self) -> Iterator[bool]:
        """Try the kept setting and its rivals by turns, from time to time, and keep the fastest."""
        while len(self._rivals) > 1 and self._rounds < MOST_ROUNDS:
            while self._steps_since < STEPS_BETWEEN_ROUNDS:
                self._steps_since += 1
                yield False
            took = self._rivals
            for setting, before in self._rivals.items():
                took = {**took, setting: [*before, *(yield from self._timed(setting, ROUND_STEPS))]}
            kept, *others = rivals_left(took)
            self._rivals = {setting: took[setting] for setting in (kept, *others)}
            self._rounds, self._steps_since = self._rounds + 1, 0
            if self._world.rank == 0:
                again = (f"{_name(each)} of {_mib(each)} {_ms(median(steps))}" for each, steps in took.items())
                self.log(f"overlap {_name(kept)}, buckets of at most {_mib(kept)}, from here on: {', '.join(again)}")
            yield self._keep(kept)

    def _keep(self, setting: Setting) -> bool:
        """Adopt a setting; return True where it is another."""
        changed, self.setting = setting != self.setting, setting
        return changed

    def _timed(self, setting: Setting, steps: int) -> Generator[bool, None, list[float]]:
        """Make one step and `steps` more with a setting; return the seconds of these on the slowest rank."""
        yield self._keep(setting)
        for _ in range(steps):
            yield False
        took = [after - before for before, after in pairwise([*self._begins][-steps - 1 :])]
        return self._world.allreduce(torch.tensor(took, dtype=torch.float64, device="cpu"), op="maximum").tolist()

    def _computes_on_all_cores(self) -> bool:
        """Return True where the ranks of one node compute on all of its cores. Predictions know nothing of it, but what
        runs beside computing there takes its cores, and ranks wait for ranks that have none."""
        world, threads = self._world, torch.get_num_threads()
        if world.nodes > 1 or self._memory.parameters[0].device.type != HOST:
            return False
        full = threads >= cores() or world.size * threads >= (os.cpu_count() or 1)
        return bool(world.allreduce(torch.tensor([float(full)], device="cpu"), op="maximum"))

    def _buckets(self, size: int, end_ratio: int) -> list[Bucket]:
        return self._memory.plan(self.order, size, end_ratio)


def _report(
    computing: Computing, cost: Cost, chosen: Trial, doubt: str, trials: Sequence[Trial], predicted: Sequence[Candidate]
) -> Iterator[str]:
    """Yield a few lines: the choice, and the reasons for it."""
    setting, prediction, *_ = candidate = chosen.candidate
    rate = f"{1e-6 / cost.per_byte:,.0f} MB/s" if cost.per_byte else "any speed"
    yield (
        f"overlap {_name(setting)}, buckets of at most {_mib(setting)}: {_ms(chosen.seconds)} a step (predicted "
        f"{_ms(prediction.step)}, {chosen.seconds / prediction.step - 1:+.0%}); computing {_ms(computing.whole)}, "
        f"communicating {_ms(prediction.communicating)} at {rate}"
    )
    if doubt:
        yield f"{doubt}: trials decide nothing, so the simplest setting is kept; its prediction is less certain"
    took = {trial.candidate.setting: f" (measured {_ms(trial.seconds)})" for trial in trials}
    alike = Counter(_name(other.setting) for other in predicted)
    others = [
        (name := _name(other.setting))
        + (f" of {_mib(other.setting)}" if alike[name] > 1 else "")
        + f" {_ms(other.prediction.step)}"
        + took.get(other.setting, "")
        for other in predicted
        if other is not candidate
    ]
    if others:
        yield f"the others as predicted: {', '.join(others)}"


def _name(setting: Setting) -> str:
    return f"{setting.overlap} ({setting.outstanding} at once)" if setting.overlap == "concurrent" else setting.overlap


def _mib(setting: Setting) -> str:
    largest, ratio = setting.bucket_bytes / (1 << 20), setting.end_ratio
    return f"{largest:g} MiB" if ratio == 1 else f"{largest:g} MiB ({largest / ratio:g} at both ends)"


def _setting_of(fields: Sequence[Any]) -> Setting:
    """Return the setting of a checkpoint, where tuples are lists."""
    known: list[Any] = [tuple(field) if isinstance(field, list) else field for field in fields]
    return Setting(*known)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
