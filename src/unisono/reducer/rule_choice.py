"""Setting of a rule in the coming step, searched in the first steps (`tuning.py`) or resumed, and the rule's memory.

All ranks have the same measurements, so they adopt the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from unisono.plan.choose import Candidate, Setting
from unisono.plan.trials import TrialChoice
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.model_collectives import ModelCollectives
from unisono.reducer.programs import Programs
from unisono.reducer.rule_state import RuleState, without_changes
from unisono.reducer.step_times import StepTimes
from unisono.reducer.tuning import Log, Tuning
from unisono.rules import BaseRule
from unisono.step.costs import Prediction


class RuleChoice:
    """Rule that the programs of one model follow. All ranks ask it together, while nothing is running."""

    def __init__(
        self,
        rule: BaseRule,
        memory: BucketMemory,
        collectives: ModelCollectives,
        times: StepTimes,
        programs: Programs,
        wait_for_all: Callable[[], None],
    ) -> None:
        """Adopt a rule with its first setting; `wait_for_all` waits for everything that is pending. Raises UsageError
        for an unknown overlap."""
        self.rule = rule
        """Rule that steps follow."""
        self.traits = rule.traits
        self._memory, self._collectives, self._programs = memory, collectives, programs
        self._wait_for_all = wait_for_all
        self._tuning = Tuning(memory, collectives, times, rule)
        weakref.finalize(self, self._tuning.close).atexit = False
        self.rule_memory = RuleState(memory, collectives.rank, collectives.size)
        """Rule's memory of this rank."""
        programs.adopt(self.setting, self._tuning.order)

    @property
    def setting(self) -> Setting:
        """Setting that gradients are exchanged with at present."""
        return self._tuning.setting

    @property
    def chosen(self) -> Candidate | None:
        """Chosen setting with its prediction and what was played for it; None where nothing was predicted."""
        return None if self._tuning.choice is None else self._tuning.choice.candidate

    @property
    def by_trials(self) -> TrialChoice | None:
        """Chosen setting with what its prediction is worth; None where nothing was predicted."""
        return self._tuning.choice

    @property
    def predicted(self) -> Prediction | None:
        """Prediction of a step from when the setting was chosen; None where nothing was predicted."""
        return None if self.chosen is None else self.chosen.prediction

    def next_step(self, deferred: bool) -> bool:
        """Adopt what has been found for the coming step. Return True where the buckets have changed.

        `deferred`: True where parameters are waited for when they are needed.
        """
        if changed := self._tuning.next_step(deferred):
            self._lay_out()
        self.rule_memory.lay_out(self.traits.state.has_anchor)
        return changed

    def record_order(self, order: Sequence[int]) -> None:
        """Record the order in which the gradients of a step became ready."""
        self._tuning.record_order(order)

    def state(self) -> dict[str, Any] | None:
        """Return the setting, for a run that resumes; None while it is being found."""
        return self._tuning.state()

    def restore(self, state: dict[str, Any] | None) -> bool:
        """Adopt the setting of the run that is resumed, if it had as many ranks and the same options. Return True where
        the buckets have changed."""
        if state is None or not self._tuning.restore(state):
            return False
        self._lay_out()
        return True

    def rule_state(self) -> dict[str, Any]:
        """Return the rule's memory of this rank and the place in its period, for a checkpoint; wait for exchanges."""
        self._wait_for_all()
        kept = self.rule_memory.segments()
        return {"cycle": list(self.traits.cycle), "first": self._programs.first, "kept": kept}

    def resume(self, step: int, rule_state: dict[str, Any] | None = None) -> None:
        """Continue after `step` steps, of which a rule's program depends on the number, with the state of this rank.

        Without a state, or where the rule has another period now, a period begins; then no change is in flight.
        """
        self._programs.number = step
        if rule_state is None:
            self._programs.first = step if self.traits.state.has_anchor else 0
            return
        same = list(self.traits.cycle) == rule_state["cycle"]
        self._programs.first = rule_state["first"] if same else step
        if self.traits.state.has_anchor:
            self.rule_memory.load(rule_state["kept"] if same else without_changes(rule_state["kept"]))

    def log_with(self, log: Log, details: Log | None = None) -> None:
        """Report too few buckets for the rule with `log`, on rank 0, and the search for an overlap and buckets with
        `details`, which is `log` unless given."""
        self._tuning.log = details or log
        buckets, wanted = len(self._memory.layout.buckets), self.traits.buckets
        if buckets < wanted and self._collectives.rank == 0:
            log(f"{buckets} of {wanted} fragments: the weights have {buckets} buckets; smaller ones give more")

    def _lay_out(self) -> None:
        """Lay the buckets out by the setting; the rule's memory follows them."""
        self.rule_memory.gather()
        self._programs.adopt(self.setting, self._tuning.order)
