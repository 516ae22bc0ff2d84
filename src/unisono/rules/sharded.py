"""Sharded: each rank sums, updates and sends its own p-th of the weights. PCL-DNN's distributed SGD (section 3.4).

         main │f0· b0········· b2·····                  f0· b0········· b2·····
communication │                w0·    r1· r2·    g2· g1·                w0·    r1· r2·    g2· g1·
       update │                    p1  p2 u1  u2     U2  U1                 p1  p2 u1  u2     U2  U1

f forward  b backward  w agree  p pack  r reduce_scatter  u update  g all_gather  U unpack

A rank has a shard of each bucket, and the optimizer's state for it alone: a p-th. The weights of the first layers (here
bucket 2) are gathered first, beside the next forward pass, which waits for each as it is read.

For 4 ranks, a bucket of n bytes: the reduce-scatter sends and receives n (p - 1) / p = 0.75 n bytes on each rank, the
all-gather as much: together the 1.5 n of an allreduce, in as many rounds (by `direct` 1 + 1, by `ring` 3 + 3). Besides,
the flags of its parameters are summed: 4 bytes each. Clipping is one more sum, of 8 bytes, in a step; LARS and LAMB
have one of 16 bytes for each parameter, and a loop of your own one of 8, in which the ranks agree on the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.step import build
from unisono.step.layout import Layout, Updates
from unisono.step.operations import AGREE, PACK
from unisono.step.program import MAIN, UPDATE, Step, StepProgram, Task, Value, bucket, gradient, state, thread, weights
from unisono.step.rule import BaseRule, RankState, Traits
from unisono.step.shards import (
    AGREE_ON_STEP,
    STEP,
    SUM_NORMS,
    UNPACK,
    UPDATE_SHARD,
    all_gather,
    clip_shards,
    reduce_scatter,
)

STEPPED = Value("stepped", 0)
"""Value that is written when the outside program has called the optimizer's step."""


@dataclass(frozen=True)
class Sharded(BaseRule):
    """Sharded updates: each rank sums the gradients of its p-th of the weights, updates it, and all ranks gather them.

    The optimizer's state takes a p-th of the memory on each rank. The weights are those of `BSP`. `clip` is the largest
    norm of all gradients. `exchange`, `overlap` and `outstanding` are those of `BSP`; a wire rounds the gradients.
    """

    clip: float | None = None
    """Largest norm of all gradients, in a loop of your own; a `Trainer` and recipes have their own option."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"Sharded(clip={self.clip!r}): the norm must be above 0, or None")

    @property
    def traits(self) -> Traits:
        """Properties: each bucket is summed and gathered by the ranks that hold it."""
        return Traits(RankState.SHARDED, groups=True)

    def __call__(self, event: Step, rank: int, layout: Layout) -> StepProgram:
        """Return the tasks of a step."""
        overlap = self.found_overlap
        passing = build.backward(layout, overlap.backward_lane(layout.deferred), rank)
        if not event.synchronize:
            return (*build.forward(layout, rank), *passing)
        sends = self.collectives(layout, rank)
        gate = build.ENDED if overlap.after else build.BEGUN
        follow = [(0, list(sends.place(AGREE, 0, (gate,), (build.CONTROL,))))]
        scattered, at_once = set[int](), self._updates_at_once(layout)
        for key in self._halves(layout):
            if key in scattered:
                follow.append((key if at_once else build.AT_THE_END, self._gather(layout, sends, key)))
                continue
            scattered.add(key)
            follow.append((key, self._scatter(layout, sends, key)))
            if layout.buffers and key == layout.filled[-1]:
                follow.append((key, build.buffers(sends)))
            if not at_once and len(scattered) == len(layout.buckets):
                follow.append((build.AT_THE_END, self._wait_for_all(layout, sends)))
        if overlap.after:
            follow = [(build.AT_THE_END, tasks) for _, tasks in follow]
        return (*build.forward(layout, rank), *build.merge(passing, follow), *build.wait_for_own(layout))

    def _halves(self, layout: Layout) -> tuple[int, ...]:
        """Return the keys in the order of their exchanges, each twice: where updates need nothing but their own bucket
        as the layout has them, else all gathers at the end, those first that the next forward pass reads first."""
        if layout.halves and self._updates_at_once(layout):
            return layout.halves
        place = {number: at for at, number in enumerate(layout.order)}
        due = {key: min(place[number] for number in layout.bucket(key).parameters) for key in layout.keys}
        return (*layout.keys, *sorted(layout.keys, key=due.__getitem__))

    def _scatter(self, layout: Layout, sends: build.CollectiveTasks, key: int) -> list[Task]:
        """Return the tasks that sum the shards of a bucket, and update this rank's where nothing else is needed."""
        own = tuple(map(gradient, layout.bucket(key).parameters))
        exchange = reduce_scatter(self.exchange.algorithm, self.exchange.wire)
        return [
            Task(PACK, key, UPDATE, (build.CONTROL,), (bucket(key), *own)),
            *sends.place(exchange, key, (), (bucket(key),)),
            *([_update(layout, key)] if self._updates_at_once(layout) else []),
        ]

    def _wait_for_all(self, layout: Layout, sends: build.CollectiveTasks) -> list[Task]:
        """Return the tasks that need all gradients: the program outside calls its optimizer, and norms are summed."""
        every, tasks = tuple(map(bucket, layout.keys)), list[Task]()
        if layout.updates is Updates.OUTSIDE:
            tasks.append(Task(STEP, 0, MAIN, every, (STEPPED, thread(MAIN))))
            tasks += sends.place(AGREE_ON_STEP, 0, (), (STEPPED,))
        if (clip := self._clip(layout)) is not None:
            tasks += sends.place(clip_shards(clip), 0, (), (*every, STEPPED, build.NORM))
        if layout.layer_norms:
            states = tuple(map(state, range(layout.parameters)))
            tasks += sends.place(SUM_NORMS, 0, (), (*every, *states, STEPPED, build.NORM))
        return tasks

    def _gather(self, layout: Layout, sends: build.CollectiveTasks, key: int) -> list[Task]:
        """Return the tasks that update this rank's shard of a bucket, unless that is done, and gather the weights."""
        written = tuple(map(weights, layout.bucket(key).parameters))
        return [
            *([] if self._updates_at_once(layout) else [_update(layout, key)]),
            *sends.place(all_gather(self.exchange.algorithm), key, (), (bucket(key),)),
            Task(UNPACK, key, UPDATE, (), (bucket(key), *written)),
        ]

    def _clip(self, layout: Layout) -> float | None:
        return self.clip if layout.clip is None else layout.clip

    def _updates_at_once(self, layout: Layout) -> bool:
        return layout.updates is not Updates.OUTSIDE and self._clip(layout) is None and not layout.layer_norms


def _update(layout: Layout, key: int) -> Task:
    """Return the optimizer's task for this rank's shard of a bucket."""
    numbers = layout.bucket(key).parameters
    written = (bucket(key), *map(state, numbers))
    return Task(UPDATE_SHARD, key, UPDATE, (STEPPED, build.NORM), written, parameters=numbers)
