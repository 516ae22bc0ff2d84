"""BSP, bulk synchronous parallel: gradients are averaged, or summed, at every step (Theano-MPI section 4: SUBGD).

rank 0   forward  backward ─┐                  ┌─ update   forward ...
rank 1   forward  backward ─┴── sum of each ───┴─ update   forward ...
                                 bucket

main            backward 1   backward 2 ...                    4 ranks, 2 buckets: a bucket of n bytes sends and
update                  pack 1      pack 2  set_grads 1 ...       receives 2 n (p - 1) / p = 1.5 n bytes on each rank
communication   agree          allreduce 1  allreduce 2
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import AGREE, PACK, PACK_SUM, SET_GRADS
from unisono.step.program import UPDATE, Step, StepProgram, Task, bucket, gradient
from unisono.step.rule import BaseRule, Traits
from unisono.tables import choice

SCALES = {"mean": PACK, "sum": PACK_SUM}
"""Operations that pack a bucket, by the combination of the gradients that they give."""


@dataclass(frozen=True)
class BSP(BaseRule):
    """Bulk synchronous parallel: every rank applies the average of all ranks' gradients in each step, as in DDP.

    Before each step all ranks have the same weights. Options: `exchange` (algorithm, wire, bucket size), `overlap`
    ("auto", "chain", "concurrent", "funnel" or "none"), `outstanding` (largest number of collectives at once; None
    chooses it), and `scale` ("mean", or "sum" over the ranks).
    """

    scale: str = choice("mean", *SCALES)
    """Combination of the gradients: "mean" over all samples; "sum" over ranks, each the mean over its own samples.

    With p equal shares of a batch the sum is p times the mean, so a learning rate tuned for one rank's share need not
    be raised with p. Weight decay is not part of either: it counts once."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UsageError(f"BSP(scale={self.scale!r}): there are {', '.join(map(repr, SCALES))}")

    @property
    def traits(self) -> Traits:
        """Properties: each bucket is averaged, or summed, over the ranks that hold it."""
        return Traits(groups=True, sums=self.scale == "sum")

    def __call__(self, event: Step, rank: int, layout: Layout) -> StepProgram:
        """Return the tasks of a step."""
        overlap = self.found_overlap
        passing = build.backward(layout, overlap.backward_lane(layout.deferred), rank)
        if not event.synchronize:
            return (*build.forward(layout, rank), *passing)
        sends = self.collectives(layout, rank)
        gate = build.ENDED if overlap.after else build.BEGUN
        follow = [(0, list(sends.place(AGREE, 0, (gate,), (build.CONTROL,))))]
        for key in layout.keys:
            follow.append((key, self._bucket(layout, sends, key)))
            if layout.buffers and key == layout.filled[-1]:
                follow.append((key, build.buffers(sends)))
        if overlap.after:
            follow = [(build.AT_THE_END, tasks) for _, tasks in follow]
        return (*build.forward(layout, rank), *build.merge(passing, follow), *build.wait(layout))

    def _bucket(self, layout: Layout, sends: build.CollectiveTasks, key: int) -> list[Task]:
        own = tuple(map(gradient, layout.bucket(key).parameters))
        return [
            Task(SCALES[self.scale], key, UPDATE, (build.CONTROL,), (bucket(key), *own)),
            *sends.place(self.allreduce(), key, (), (bucket(key),)),
            Task(SET_GRADS, key, UPDATE, (), (bucket(key),)),
            *build.updates(layout, key, sends),
        ]
