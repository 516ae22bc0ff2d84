"""Step programs of a model under its setting, which is searched in the first steps (`tuning.py`) or resumed.

A program is built once, prepared for the engine, and run again in each step. All ranks have the same measurements, so
they adopt the same setting.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from unisono.engine import Observe
from unisono.engine.communicator_pool import ModelCollectives
from unisono.placement import Partition
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.tuning import Log, StepTimes, Tuning
from unisono.reducer.virtual_ranks import VirtualRanks
from unisono.reducer.weights import RuleState, without_changes
from unisono.rules import BaseRule
from unisono.step.layout import Layout, Updates
from unisono.step.overlaps import Overlap
from unisono.step.play import LinkOf, Player, Prepared
from unisono.step.program import Step, StepProgram
from unisono.step.verify import check_groups, check_threads
from unisono.transports.exact import ExactSums


class Programs:
    """Step programs of one model. All ranks construct it together, and ask it together, while nothing is running."""

    player: Player
    """Player that runs the programs."""
    overlap: Overlap
    """Overlap of the setting."""
    exact: ExactSums | None = None
    """Sums of integers, with the wire "exact"."""
    virtual: VirtualRanks | None = None
    """Shares of this rank, whose gradients a pass sums with its own; None where a rank is a share."""

    def __init__(
        self,
        rule: BaseRule,
        memory: BucketMemory,
        buffers: Buffers,
        collectives: ModelCollectives,
        times: StepTimes,
        observe: Observe,
        link: LinkOf | None = None,
    ) -> None:
        """Adopt a rule with its first setting. `link` is that of `Player`. Raises UsageError for an unknown overlap."""
        self.memory, self.buffers, self.collectives, self.times = memory, buffers, collectives, times
        self.observe, self.traits = observe, rule.traits
        self.rule_memory = RuleState(memory, collectives.rank, collectives.size)
        """Rule's memory of this rank."""
        self.step = 0
        """Number of the next step that synchronizes."""
        self.first = 0
        """Number of the step with which the first period begins."""
        self.communicators = 0
        """Number of communicators of the programs."""
        self._phases: tuple[Partition, ...] = ()
        self.layer_norms = False
        """True where the optimizer's step needs norms of whole layers."""
        self._rule, self._link = rule, link
        # pieces of a device's buckets are sent as they come, which ranks of a node would cut in other places
        self._nodes = collectives.placement.nodes if memory.copies is None else ()
        self.tuning = Tuning(memory, collectives, times, rule, self._nodes)
        """Search for the setting that gradients are exchanged with."""
        weakref.finalize(self, self.tuning.close).atexit = False
        self._prepared: dict[tuple[Updates, float | None, StepProgram], tuple[Layout, Prepared]] = {}
        """Prepared programs. Equal steps of a period share one."""
        self._made: dict[tuple[Updates, float | None, bool, int], tuple[Layout, Prepared]] = {}
        self._adopt()

    # Setting

    def next_step(self, deferred: bool) -> bool:
        """Adopt what has been found for the coming step. Return True where the buckets have changed.

        `deferred`: True where parameters are waited for when they are needed.
        """
        self.memory.record_progress()
        if changed := self.tuning.next_step(deferred):
            self._adopt()
        self.lay_out_memory()
        return changed

    def lay_out_memory(self) -> None:
        """Prepare the rule's memory for a step. The first anchor is rank 0's weights: ranks may have loaded others."""
        for anchor in self.rule_memory.lay_out(self.traits.state.has_anchor):
            self.memory.join()
            self.collectives.broadcast(anchor)

    def log_with(self, log: Log, details: Log | None = None) -> None:
        """Report too few buckets for the rule with `log`, on rank 0, and the search for an overlap and buckets with
        `details`, which is `log` unless given."""
        self.tuning.log = details or log
        buckets, wanted = len(self.memory.buckets), self.traits.buckets
        if buckets < wanted and self.collectives.rank == 0:
            log(f"{buckets} of {wanted} fragments: the weights have {buckets} buckets; smaller ones give more")

    # A run that resumes

    def restore(self, state: dict[str, Any] | None) -> bool:
        """Adopt the setting of the run that is resumed, if it had one for as many ranks and the same options. Return
        True where the buckets have changed."""
        if state is None or not self.tuning.restore(state):
            return False
        self._adopt()
        return True

    def rule_state(self) -> dict[str, Any]:
        """Return the rule's memory of this rank and the place in its period, for a checkpoint. No exchange may be in
        flight."""
        return {"cycle": list(self.traits.cycle), "first": self.first, "kept": self.rule_memory.segments()}

    def resume(self, step: int, rule_state: dict[str, Any] | None = None) -> None:
        """Continue after `step` steps, of which a rule's program depends on the number, with the state of this rank.

        Without a state, or where the rule has another period now, a period begins; then no change is in flight.
        """
        self.step, has_anchor = step, self.traits.state.has_anchor
        if rule_state is None:
            self.first = step if has_anchor else 0
            return
        same = list(self.traits.cycle) == rule_state["cycle"]
        self.first = rule_state["first"] if same else step
        if has_anchor:
            self.rule_memory.load(rule_state["kept"] if same else without_changes(rule_state["kept"]))

    # Programs

    def next(self, updates: Updates, clip: float | None) -> tuple[Layout, Prepared]:
        """Return the layout and the program of the next step that synchronizes, and advance `step`."""
        step = (self.step - self.first) % self.traits.period
        self.step += 1
        key = updates, clip, self.layer_norms, step
        if key not in self._made:
            self._made[key] = self._make(updates, clip, step)
        return self._made[key]

    def layout(self) -> Layout:
        """Return the layout of the buckets that were adopted last."""
        return Layout(
            self.collectives.size,
            len(self.memory.parameters),
            self.memory.buckets,
            self.memory.filled,
            buffers=bool(self.buffers.slots) and self.collectives.size > 1,
            layer_norms=self.layer_norms,
            halves=self.tuning.setting.halves,
            nodes=self._nodes,
        )

    def _make(self, updates: Updates, clip: float | None, step: int) -> tuple[Layout, Prepared]:
        deferred, rank = updates is not Updates.OUTSIDE, self.collectives.rank
        layout = replace(self.layout(), updates=updates, deferred=deferred, clip=clip)
        program = self._rule(Step(step), rank, layout)
        if (updates, clip, program) not in self._prepared:
            check_groups(rank, program)
            check_threads(rank, program, self._rule.threads())
            self._prepared[updates, clip, program] = layout, self.player.prepare(program)
        return self._prepared[updates, clip, program]

    def _adopt(self) -> None:
        """Lay the buckets out by the setting; the rule's memory follows them. No program may be running."""
        self.rule_memory.load(self.rule_memory.segments())
        setting = self.tuning.setting
        self.memory.lay_out(self.tuning.order, setting.bucket_bytes, setting.sequence, setting.end_ratio)
        self._made.clear()
        self._prepared.clear()
        self._rule = replace(self._rule, overlap=setting.overlap, outstanding=setting.outstanding)
        self.overlap = self._rule.found_overlap
        phases = self.layout().phases if self.overlap.phases else ()
        if (self.communicators, self._phases) != (self._rule.communicators, phases):
            self.communicators, self._phases = self._rule.communicators, phases
            pool, user = self.collectives.pool, self.collectives.user
            partitions = (*self.memory.parts.holders.values(), *self._rule.partitions(self.collectives.size), *phases)
            self.player = Player(pool, self.communicators, user, self.observe, self._link, partitions)
