"""What all rules are told of how ranks communicate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.rules.exchange import Exchange
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import allreduce
from unisono.step.overlaps import Overlap, find_overlap
from unisono.step.program import COMMUNICATION, Operation
from unisono.step.rule import ONE_THREAD

AUTO = "auto"

OUTSTANDING = 2
"""Collectives that go on at once at most, where several may and nothing else is said."""


@dataclass(frozen=True)
class Options:
    """How a rule's collectives go, and where they sit in the step."""

    exchange: Exchange = field(default_factory=Exchange)
    overlap: str = AUTO
    """Where communication sits in the step: "chain", "concurrent", "funnel" or "none" (`step/overlaps/` draws them);
    "auto": what is predicted to be the fastest once the first steps were measured."""
    outstanding: int | None = None
    """Collectives that go on at once at most, where the overlap has several; None: what is predicted to be best."""

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
