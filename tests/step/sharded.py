"""Distributed SGD as a step program (PCL-DNN section 3.4): a rule is one file.

main            backward 1              backward 2
update                  pack 1   update 1        pack 2   update 2          each rank updates its own shard
communication   agree   reduce_scatter 1         reduce_scatter 2   all_gather 2   all_gather 1
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.rules.base import BaseRule
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import AGREE, ALL_GATHER, PACK, REDUCE_SCATTER, UPDATE_SHARD
from unisono.step.program import UPDATE, Step, StepProgram, Task, bucket, gradient, state


@dataclass(frozen=True)
class Sharded(BaseRule):
    """Each rank updates the shard of the weights whose gradients it has summed."""

    def __call__(self, event: Step, _: int, layout: Layout) -> StepProgram:
        """Return the tasks of a step."""
        passing = build.backward(layout, self.found_overlap.backward_lane(layout.deferred))
        sends = self.collectives(layout)
        follow = [(0, list(sends.place(AGREE, 0, (build.BEGUN,), (build.CONTROL,))))]
        for key in layout.keys:
            own = layout.bucket(key).parameters
            packing = Task(PACK, key, UPDATE, (build.CONTROL,), (bucket(key), *map(gradient, own)))
            states = tuple(map(state, own))
            updating = Task(UPDATE_SHARD, key, UPDATE, (), (bucket(key), *states), parameters=own)
            follow.append((key, [packing, *sends.place(REDUCE_SCATTER, key, (), (bucket(key),)), updating]))
        gathers: list[Task] = []
        for key in reversed(layout.keys):  # the first layers' weights first: the next forward needs them
            written = tuple(value for value in build.stepped(layout.bucket(key).parameters) if value.kind == "weights")
            gathers += sends.place(ALL_GATHER, key, (), (bucket(key), *written))
        return (*build.forward(layout), *build.merge(passing, follow), *gathers, *build.wait(layout))
