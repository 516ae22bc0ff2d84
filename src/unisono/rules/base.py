"""What rules have in common: how their collectives go, where these sit in the step, and what most rules promise.

A rule of one's own is a frozen dataclass that inherits from `BaseRule` and gives a program for each event
(`docs/rules.md` has one of 20 lines).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.rules.exchange import Exchange
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import allreduce
from unisono.step.overlaps import Overlap, find_overlap
from unisono.step.program import COMMUNICATION, Operation, Step, StepProgram
from unisono.step.rule import ONE_THREAD, Promise, Whose

AUTO = "auto"

OUTSTANDING = 2
"""Collectives that go on at once at most, where several may and nothing else is said."""


@dataclass(frozen=True)
class BaseRule(ABC):
    """A rule by which all ranks have the same weights after each step that synchronizes, unless it says otherwise."""

    exchange: Exchange = field(default_factory=Exchange)
    overlap: str = AUTO
    """Where communication sits in the step: "chain", "concurrent", "funnel" or "none" (`step/overlaps/` draws them);
    "auto": what is predicted to be the fastest once the first steps were measured."""
    outstanding: int | None = None
    """Collectives that go on at once at most, where the overlap has several; None: what is predicted to be best."""

    @abstractmethod
    def __call__(self, event: Step, rank: int, layout: Layout, /) -> StepProgram:
        """Return the tasks of an event on one rank."""

    def promise(self, event: Step) -> Promise:
        """Return what must hold: everybody's gradients are applied in each step that synchronizes."""
        return Promise(Whose.ALL if event.synchronize else None)

    @property
    def period(self) -> int:
        """Return after how many steps the programs repeat."""
        return 1

    @property
    def differs(self) -> bool:
        """False: all ranks have the same weights, so that a checkpoint holds rank 0's."""
        return False

    def threads(self) -> Mapping[str, int]:
        """Return how many threads each lane has: one for each communicator."""
        return {**ONE_THREAD, COMMUNICATION: self.communicators}

    @property
    def found_overlap(self) -> Overlap:
        """The overlap; chain where it has to be looked for. Raises UsageError for an unknown name."""
        return find_overlap("chain" if self.overlap == AUTO else self.overlap)

    @property
    def communicators(self) -> int:
        """Communicators that the programs use."""
        return self.found_overlap.communicators(self.outstanding or OUTSTANDING)

    def collectives(self, layout: Layout) -> build.Collectives:
        """Return what places a step's collectives."""
        return build.Collectives(layout, self.found_overlap, self.outstanding or OUTSTANDING)

    def allreduce(self) -> Operation:
        """Return the operation that sums a bucket, as `exchange` says."""
        return allreduce(self.exchange.algorithm, self.exchange.wire)
