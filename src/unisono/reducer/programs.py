"""Step programs of a model under a setting: built once, prepared for the engine, and run again in each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from unisono.engine import OperationSpan
from unisono.engine.communicator_pool import CommunicatorPool
from unisono.placement import Partition
from unisono.plan.choose import Setting
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.model_collectives import ModelCollectives
from unisono.rules import BaseRule
from unisono.step.layout import Bucket, Layout, Updates
from unisono.step.play import LinkOf, Player, Prepared
from unisono.step.program import Step, StepProgram
from unisono.step.verify import check_groups, check_threads


class Programs:
    """Step programs of one model. All ranks of a world construct it together."""

    def __init__(
        self,
        memory: BucketMemory,
        pool: CommunicatorPool,
        rule: BaseRule,
        collectives: ModelCollectives,
        user: str,
        observe: Callable[[OperationSpan], None],
        buffers: bool,
        link: LinkOf | None = None,
        partitions: Sequence[Partition] = (),
    ) -> None:
        """Store the inputs of the programs. `buffers`: True where buffers are sent; the last two are `Player`'s."""
        self._link, self._partitions = link, partitions
        self._memory, self._pool, self._rule, self._collectives = memory, pool, rule, collectives
        self._user, self._observe, self._has_buffers = user, observe, buffers
        self._period = rule.traits.period
        self._player: Player | None = None
        self._communicators = 0
        self.number = 0
        """Number of the next step that synchronizes."""
        self.first = 0
        """Number of the step with which the first period begins."""
        self._buckets: tuple[Bucket, ...] = ()
        self._filled: tuple[int, ...] = ()
        self._halves: tuple[int, ...] = ()
        self.layer_norms = False
        """True where the optimizer's step needs norms of whole layers."""
        self._prepared: dict[tuple[Updates, bool, float | None, StepProgram], tuple[Layout, Prepared]] = {}
        """Prepared programs. Equal steps of a period share one."""
        self._made: dict[tuple[Updates, bool, float | None, int], tuple[Layout, Prepared]] = {}

    @property
    def player(self) -> Player:
        """Player that runs the programs."""
        assert self._player is not None, "it is made with the first setting"
        return self._player

    @property
    def communicators(self) -> int:
        """Number of communicators of the programs."""
        return self._communicators

    @property
    def by_main(self) -> bool:
        """True where the main thread runs collectives."""
        return self._rule.found_overlap.by_main

    def adopt(self, setting: Setting, order: Sequence[int]) -> None:
        """Adopt a setting, for gradients that become ready in `order`. No program may be running."""
        memory = self._memory
        for parameter, view in zip(memory.parameters, memory.views, strict=False):
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = parameter.grad.clone()  # what accumulates there
        buckets = memory.lay_out(order, setting.bucket_bytes, setting.sequence, setting.end_ratio).buckets
        sequence = setting.sequence or range(len(buckets))
        keys = {number: key for key, number in enumerate(sequence, 1)}
        self._buckets = tuple(memory.bucket_of(buckets[number]) for number in sequence)
        self._filled = tuple(keys[number] for number in range(len(buckets)))
        self._halves = setting.halves
        self._rule = replace(self._rule, overlap=setting.overlap, outstanding=setting.outstanding)
        self._made.clear()
        self._prepared.clear()
        if self._player is None or self._communicators != self._rule.communicators:
            self._communicators = self._rule.communicators
            self._player = Player(
                self._pool, self._communicators, self._user, self._observe, self._link, self._partitions
            )

    def next(self, updates: Updates, deferred: bool, clip: float | None) -> tuple[Layout, Prepared]:
        """Return the layout and the program of the next step that synchronizes, and advance `number`."""
        number = (self.number - self.first) % self._period
        self.number += 1
        made = self._made.get((updates, deferred, clip, number))
        if made is None:
            made = self._make(updates, deferred, clip, number)
            self._made[updates, deferred, clip, number] = made
        return made

    def take_back(self) -> None:
        """Let the next program be that of the last step again, of which nothing was exchanged."""
        self.number -= 1

    def layout(self) -> Layout:
        """Return the layout of the buckets that were adopted last."""
        count = len(self._memory.parameters)
        made = Layout(self._collectives.size, count, self._buckets, self._filled, buffers=self._has_buffers)
        return replace(made, layer_norms=self.layer_norms, halves=self._halves)

    def _make(self, updates: Updates, deferred: bool, clip: float | None, number: int) -> tuple[Layout, Prepared]:
        layout = replace(self.layout(), updates=updates, deferred=deferred, clip=clip)
        program = self._rule(Step(number), self._collectives.rank, layout)
        found = self._prepared.get((updates, deferred, clip, program))
        if found is None:
            check_groups(self._collectives.rank, program)
            check_threads(self._collectives.rank, program, self._rule.threads())
            found = self._prepared[updates, deferred, clip, program] = layout, self.player.prepare(program)
        return found
