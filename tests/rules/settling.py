"""Asynchronous rule of `docs/rules.md`: workers move less after 100 steps."""

from dataclasses import dataclass, replace

from unisono.rules import EASGD
from unisono.step.layout import Layout
from unisono.step.program import Step, StepProgram


@dataclass(frozen=True)
class Settling(EASGD):
    def __call__(self, event: Step, worker: int, layout: Layout) -> StepProgram:
        alpha = self.alpha if event.number < 100 else self.alpha / 2
        return EASGD.__call__(replace(self, alpha=alpha), event, worker, layout)
