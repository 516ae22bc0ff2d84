"""Auto: BSP in the first steps, then BSP or Sharded, whichever is predicted to be faster from their measurements.

    steps 0 to about 25      BSP; its overlap and buckets are searched       plan/choose.py
    then                     the rule whose best setting has the shorter step     plan/choose_rule.py

Both give the same weights. With Sharded each rank updates a p-th, with a collective more for each bucket: it is faster
where updates take longer than that. Then each rank keeps its part of the optimizer's state and drops the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.rules.base import BaseRule
from unisono.rules.bsp import BSP
from unisono.rules.sharded import Sharded
from unisono.step.layout import Layout
from unisono.step.program import Step, StepProgram


@dataclass(frozen=True)
class Auto(BaseRule):
    """Rule that is replaced by BSP or Sharded after the first steps, for a `Trainer` and recipes."""

    def __call__(self, event: Step, rank: int, layout: Layout) -> StepProgram:
        """Return the tasks of a step, those of BSP."""
        return BSP(self.exchange, self.overlap, self.outstanding)(event, rank, layout)

    @property
    def alternatives(self) -> tuple[BaseRule, ...]:
        """Rules to choose from; the first is taken where there is nothing to choose by."""
        options = self.exchange, self.overlap, self.outstanding
        return BSP(*options), Sharded(*options)
