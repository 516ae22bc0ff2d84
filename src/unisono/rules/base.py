"""Base of all rules: the algorithm of their collectives, their overlap, and the guarantee that most of them give.

A custom rule is a frozen dataclass that inherits from `BaseRule` and returns a program for each event (`docs/rules.md`
has one of 20 lines).
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
from unisono.step.rule import ONE_THREAD, GradientSource, Guarantee

AUTO = "auto"

OUTSTANDING = 2
"""Largest number of collectives at once, where several may run and no other number is given."""


@dataclass(frozen=True)
class BaseRule(ABC):
    """Rule by which all ranks have the same weights after each step that synchronizes, unless its guarantee differs."""

    exchange: Exchange = field(default_factory=Exchange)
    overlap: str = AUTO
    """Place of communication in the step: "chain", "concurrent", "funnel" or "none" (`step/overlaps/` draws them).
    "auto" chooses the one that is predicted to be the fastest from the first steps."""
    outstanding: int | None = None
    """Largest number of collectives at once, where the overlap has several; None chooses it from the first steps."""

    @abstractmethod
    def __call__(self, event: Step, rank: int, layout: Layout, /) -> StepProgram:
        """Return the tasks of an event on one rank."""

    def guarantee(self, event: Step) -> Guarantee:
        """Return the guarantee of an event: all ranks' gradients are applied in each step that synchronizes."""
        return Guarantee(GradientSource.ALL if event.synchronize else None)

    @property
    def algorithm(self) -> str:
        """Schedule of the exchanges by its name; "auto" where each call chooses."""
        return self.exchange.algorithm

    @property
    def period(self) -> int:
        """Number of steps after which the programs repeat."""
        return 1

    @property
    def cycle(self) -> tuple[int, ...]:
        """Numbers that the steps of a period depend on. A run that resumes with others begins a new period."""
        return (self.period,)

    @property
    def least_buckets(self) -> int:
        """Number of buckets that the rule needs. The largest bucket is chosen so that there are as many."""
        return 1

    @property
    def keeps_anchor(self) -> bool:
        """True where each rank keeps an anchor: weights that all ranks have in common."""
        return False

    @property
    def evaluates_anchor(self) -> bool:
        """True where evaluations and checkpoints use the anchor. Otherwise they use the mean of the ranks' weights,
        where these differ."""
        return False

    @property
    def differs(self) -> bool:
        """False: all ranks have the same weights, so a checkpoint holds rank 0's."""
        return False

    @property
    def sharded(self) -> bool:
        """False: each rank applies all gradients. True where it updates its shard of the weights, with an optimizer
        that has state for this shard alone."""
        return False

    @property
    def sums_gradients(self) -> bool:
        """False: gradients are averaged. True where they are summed over the ranks."""
        return False

    @property
    def asynchronous(self) -> bool:
        """False: all ranks take part in the rule's collectives. True for the rules of `asynchronous.py`."""
        return False

    @property
    def takes_split_layers(self) -> bool:
        """False: layers cannot be split over ranks. True where each bucket may have a group of ranks of its own."""
        return False

    def threads(self) -> Mapping[str, int]:
        """Return the number of threads of each lane. Communication has one for each communicator."""
        return {**ONE_THREAD, COMMUNICATION: self.communicators}

    @property
    def found_overlap(self) -> Overlap:
        """Overlap of the rule; chain where it has to be searched. Raises UsageError for an unknown name."""
        return find_overlap("chain" if self.overlap == AUTO else self.overlap)

    @property
    def communicators(self) -> int:
        """Number of communicators that the programs use."""
        return self.found_overlap.communicators(self.outstanding or OUTSTANDING)

    def collectives(self, layout: Layout, rank: int = 0) -> build.CollectiveTasks:
        """Return the builder that places a step's collectives; `rank` counts where parameters are split over ranks."""
        return build.CollectiveTasks(layout, self.found_overlap, self.outstanding or OUTSTANDING, rank)

    def allreduce(self) -> Operation:
        """Return the operation that sums a bucket, with the algorithm and wire format of `exchange`."""
        return allreduce(self.exchange.algorithm, self.exchange.wire)
