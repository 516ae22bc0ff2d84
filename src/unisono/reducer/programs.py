"""Step programs of a model under a setting: built once, prepared for the engine, and run again in each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from unisono.engine import Span
from unisono.engine.exchanges import Exchanges
from unisono.plan.choose import Setting
from unisono.reducer.memory import Memory
from unisono.reducer.talk import Talk
from unisono.rules import BaseRule
from unisono.step.layout import Bucket, Layout, Updates
from unisono.step.play import Player, Prepared
from unisono.step.program import Step, StepProgram
from unisono.step.verify import check_groups, check_threads


class Programs:
    """Step programs of one model. All ranks of a world construct it together."""

    def __init__(
        self,
        memory: Memory,
        exchanges: Exchanges,
        rule: BaseRule,
        talk: Talk,
        user: str,
        observe: Callable[[Span], None],
        buffers: bool,
    ) -> None:
        """Store the inputs of the programs. `buffers`: True where rank 0's buffers are sent with the gradients."""
        self._memory, self._exchanges, self._rule, self._talk = memory, exchanges, rule, talk
        self._user, self._observe, self._has_buffers = user, observe, buffers
        self._player: Player | None = None
        self._communicators = 0
        self.number = 0
        """Number of the next step that synchronizes."""
        self._buckets: tuple[Bucket, ...] = ()
        self._filled: tuple[int, ...] = ()
        self._prepared: dict[tuple[Updates, bool, float | None, StepProgram], tuple[Layout, Prepared]] = {}
        """Prepared programs. Equal steps of a period share one."""
        self._made: dict[tuple[Updates, bool, float | None, int], tuple[Layout, Prepared]] = {}

    @property
    def player(self) -> Player:
        """Player that runs the programs."""
        assert self._player is not None, "it is made with the first setting"
        return self._player

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
        stretches = memory.lay_out(order, setting.bucket_bytes, setting.sequence).stretches
        places = setting.sequence or range(len(stretches))
        keys = {number: key for key, number in enumerate(places, 1)}
        self._buckets = tuple(Bucket(stretches[number].nbytes, stretches[number].parameters) for number in places)
        self._filled = tuple(keys[number] for number in range(len(stretches)))
        self._rule = replace(self._rule, overlap=setting.overlap, outstanding=setting.outstanding)
        self._made.clear()
        self._prepared.clear()
        if self._player is None or self._communicators != self._rule.communicators:
            self._communicators = self._rule.communicators
            self._player = Player(self._exchanges, self._communicators, self._user, self._observe)

    def next(self, updates: Updates, deferred: bool, clip: float | None) -> tuple[Layout, Prepared]:
        """Return the layout and the program of the next step that synchronizes, and advance `number`."""
        number = self.number % self._rule.period
        self.number += 1
        made = self._made.get((updates, deferred, clip, number))
        if made is None:
            made = self._make(updates, deferred, clip, number)
            self._made[updates, deferred, clip, number] = made
        return made

    def _make(self, updates: Updates, deferred: bool, clip: float | None, number: int) -> tuple[Layout, Prepared]:
        count = len(self._memory.parameters)
        layout = Layout(self._talk.size, count, self._buckets, self._filled)
        layout = replace(layout, updates=updates, deferred=deferred, clip=clip, buffers=self._has_buffers)
        program = self._rule(Step(number), self._talk.rank, layout)
        found = self._prepared.get((updates, deferred, clip, program))
        if found is None:
            check_groups(self._talk.rank, program)
            check_threads(self._talk.rank, program, self._rule.threads())
            found = self._prepared[updates, deferred, clip, program] = layout, self.player.prepare(program)
        return found
