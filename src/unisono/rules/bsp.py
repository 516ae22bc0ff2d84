"""BSP, bulk synchronous parallel: gradients are averaged at every step (Theano-MPI section 3.1: SUBGD, here the mean).

rank 0   forward  backward ─┐                  ┌─ update   forward ...
rank 1   forward  backward ─┴── sum of each ───┴─ update   forward ...
                                 bucket

main            backward 1   backward 2 ...                    4 ranks, 2 buckets: a bucket of n bytes sends and
update                  pack 1      pack 2  settle 1 update 1     receives 2 n (p - 1) / p = 1.5 n bytes on each rank
communication   agree          allreduce 1  allreduce 2
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.rules.base import BaseRule
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import AGREE, PACK, SETTLE
from unisono.step.program import UPDATE, Step, StepProgram, Task, bucket, gradient


@dataclass(frozen=True)
class BSP(BaseRule):
    """Rule by which every rank has the same weights before each step, and applies the same averaged gradients in it."""

    def __call__(self, event: Step, _: int, layout: Layout) -> StepProgram:
        """Return the tasks of a step."""
        overlap = self.found_overlap
        passing = build.backward(layout, overlap.backward_lane(layout.deferred))
        if not event.synchronize:
            return (*build.forward(layout), *passing)
        sends = self.collectives(layout)
        gate = build.ENDED if overlap.after else build.BEGUN
        follow = [(0, list(sends.place(AGREE, 0, (gate,), (build.WORD,))))]
        for key in layout.keys:
            follow.append((key, self._bucket(layout, sends, key)))
            if layout.buffers and key == layout.filled[-1]:
                follow.append((key, build.buffers(sends)))
        if overlap.after:
            follow = [(build.AT_THE_END, tasks) for _, tasks in follow]
        return (*build.forward(layout), *build.behind(passing, follow), *build.wait(layout))

    def _bucket(self, layout: Layout, sends: build.Collectives, key: int) -> list[Task]:
        own = tuple(map(gradient, layout.bucket(key).parameters))
        return [
            Task(PACK, key, UPDATE, (build.WORD,), (bucket(key), *own)),
            *sends.place(self.allreduce(), key, (), (bucket(key),)),
            Task(SETTLE, key, UPDATE, (), (bucket(key),)),
            *build.updates(layout, key),
        ]
