"""Asynchronous rule of `docs/rules.md`: worker 0 is tied to the centre half as strongly as the others."""

from dataclasses import dataclass, replace

from unisono.rules import EASGD
from unisono.step.build import Followers
from unisono.step.layout import Layout
from unisono.step.program import Arrival, Step, StepProgram


@dataclass(frozen=True)
class Leader(EASGD):
    def of(self, worker: int) -> "Leader":
        return self if worker else replace(self, alpha=self.alpha / 2)

    def follow(self, event: Step, worker: int, layout: Layout) -> Followers:
        return EASGD.follow(self.of(worker), event, worker, layout)

    def serve(self, event: Arrival, server: int, layout: Layout) -> StepProgram:
        return EASGD.serve(self.of(event.worker), event, server, layout)
