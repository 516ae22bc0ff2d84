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

    bucket, 4 ranks      rank 0      rank 1      rank 2
    pack                 g0 g0 g0 g0 │ g1 g1 g1 g1 │ ...                 gradients of each rank, whole
    reduce_scatter       G  .  .  .  │ .  G  .  .  │ .  .  G  .  ...     their sum, a shard
    update               W  .  .  .  │ .  W  .  .  │ .  .  W  .  ...     new weights in its place
    all_gather           W  W  W  W  │ W  W  W  W  │ ...                 whole again

A parameter whose flags are 0 on all ranks has no gradient, and is not updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.schedules.pieces import bounds
from unisono.step import build
from unisono.step.costs import Duration, half_exchange
from unisono.step.layout import Layout, Updates
from unisono.step.operations import PACK, needs_all, price_unpack, small_collective
from unisono.step.overlaps import CollectiveTasks
from unisono.step.program import MAIN, UPDATE, Operation, Role, Step, Task, Value, bucket, state, thread, weights
from unisono.step.rule import BaseRule, RankState, Traits
from unisono.step.symbolic_state import Contents, Stage, SymbolicState, each, sum_buckets
from unisono.wires import EXACT

if TYPE_CHECKING:
    import torch

# Operations ---------------------------------------------------------------------------------------------------------


@each
def _update_shard(member: SymbolicState, task: Task) -> None:
    shard = member.contents(task, Stage.SHARD)
    versions = {parameter: member.update(parameter, task.key, total) for parameter, total in shard.items()}
    member.buckets[task.key] = Contents(Stage.UPDATED, versions)


def _all_gather(ranks: Sequence[SymbolicState], task: Task) -> None:
    shards, joined = [member.contents(task, Stage.UPDATED) for member in ranks], ranks[0].versions.joined
    gathered = {parameter: joined([shard[parameter] for shard in shards], "gathered") for parameter in shards[0]}
    for member in ranks:
        member.buckets[task.key] = Contents(Stage.GATHERED, gathered)


@each
def _unpack(member: SymbolicState, task: Task) -> None:
    for parameter, version in member.take_contents(task, Stage.GATHERED).parts.items():
        member.check_read(parameter, task)
        member.weights[parameter][task.key] = version


def own_shard(flat: torch.Tensor, world: Any) -> torch.Tensor:
    """Return this rank's shard of a bucket, where it lies."""
    return flat[slice(*bounds(len(flat), world.size, world.rank))]


@cache
def reduce_scatter(algorithm: str = "auto", wire: str | None = None) -> Operation:
    """Return the operation by which each rank gets the sum of its shard of a bucket, in a wire format."""

    def act(replica: Any, task: Task, world: Any) -> None:
        exact = wire == EXACT
        flat = replica.integers(task.key) if exact else replica.sums(task.key)
        own_shard(flat, world).copy_(world.reduce_scatter(flat, algorithm, wire))
        if exact:
            replica.decode(task.key, *bounds(len(flat), world.size, world.rank))
        world.allreduce(replica.shards.presence[task.key])

    return Operation(
        "reduce_scatter", act, sum_buckets(Stage.GRADIENTS, into=Stage.SHARD), half_exchange, Role.COLLECTIVE
    )


@cache
def all_gather(algorithm: str = "auto") -> Operation:
    """Return the operation by which each rank gets the others' shards of a bucket. No wire rounds weights."""

    def act(replica: Any, task: Task, world: Any) -> None:
        flat = replica.sums(task.key)
        world.all_gather(own_shard(flat, world), flat, algorithm)

    return Operation("all_gather", act, _all_gather, half_exchange, Role.COLLECTIVE, "g")


_whole = needs_all(Stage.SHARD)


@cache
def clip_shards(limit: float, exact: bool = False) -> Operation:
    """Return the operation that scales all gradients, so that their common norm is at most `limit`: one sum; with
    `exact` one that does not depend on the shards."""
    return small_collective("clip", lambda replica, _, world: replica.shards.clip(limit, world, exact), _whole)


@cache
def sum_norms(exact: bool) -> Operation:
    """Return the operation that sums the squares of whole layers' norms over the ranks, for LARS and LAMB."""
    return small_collective(
        "norms", lambda replica, _, world: replica.shards.sum_norms(world, exact), _whole, letter="l"
    )


STEP = Operation("step", None)
"""Step of the outside program's optimizer: the shards are updated when it has been called."""

AGREE_ON_STEP = small_collective("agree_on_step", lambda replica, _, world: replica.agree_on_step(world), letter="W")
"""Sum of what the ranks say of that step: all have made it, or none, and of the same gradients."""

UPDATE_SHARD = Operation(
    "update",
    lambda replica, task, _: replica.update_shard(task.key),
    _update_shard,
    lambda it, costs: Duration(costs.nbytes(it.key) * costs.computing.update / len(costs.layout.group_of(it.key, 0))),
)
"""Optimizer's step for this rank's shard of a bucket, whose gradients are replaced by weights."""

UNPACK = Operation(
    "unpack", lambda replica, task, _: replica.unpack_shards(task.key), _unpack, price_unpack, letter="U"
)
"""Copy of a bucket's gathered weights to its parameters."""

# Rule ---------------------------------------------------------------------------------------------------------------

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
        super().__post_init__()
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"Sharded(clip={self.clip!r}): the norm must be above 0, or None")

    @property
    def traits(self) -> Traits:
        """Properties: each bucket is summed and gathered by the ranks that hold it."""
        return Traits(RankState.SHARDED, groups=True, exact=True)

    def follow(self, _: Step, rank: int, layout: Layout) -> build.Followers:
        """Return the tasks that follow buckets: each is summed in shards, updated and gathered."""
        sends, scattered, at_once = self.collectives(layout, rank), set[int](), self._updates_at_once(layout)
        yield self.due(0), self.agree(sends, self.gate)
        for key in self._halves(layout):
            if key in scattered:
                yield self.due(key) if at_once else build.AT_THE_END, self._gather(layout, sends, key)
                continue
            scattered.add(key)
            exchange = reduce_scatter(self.exchange.algorithm, self.exchange.wire)
            summed = build.summed(layout, key, sends, PACK, exchange, self.exchange.wire)
            yield self.due(key), [*summed, *([_update(layout, key)] if at_once else [])]
            if layout.buffers and key == layout.filled[-1]:
                yield self.due(key), build.buffers(sends)
            if not at_once and len(scattered) == len(layout.buckets):
                yield build.AT_THE_END, self._wait_for_all(layout, sends)
        yield build.AT_THE_END, build.wait_for_weights(layout)

    def _halves(self, layout: Layout) -> tuple[int, ...]:
        """Return the keys in the order of their exchanges, each twice: where updates need nothing but their own bucket
        as the layout has them, else all gathers at the end, those first that the next forward pass reads first."""
        if layout.halves and self._updates_at_once(layout):
            return layout.halves
        place = {index: position for position, index in enumerate(layout.order)}
        due = {key: min(place[index] for index in layout.bucket(key).parameters) for key in layout.keys}
        return (*layout.keys, *sorted(layout.keys, key=due.__getitem__))

    def _wait_for_all(self, layout: Layout, sends: CollectiveTasks) -> list[Task]:
        """Return the tasks that need all gradients: the program outside calls its optimizer, and norms are summed."""
        buckets, tasks, exact = tuple(map(bucket, layout.keys)), list[Task](), self.exchange.wire == EXACT
        if layout.updates is Updates.OUTSIDE:
            tasks.append(Task(STEP, 0, MAIN, buckets, (STEPPED, thread(MAIN))))
            tasks += sends.place(AGREE_ON_STEP, 0, (), (STEPPED,))
        if (clip := self._clip(layout)) is not None:
            tasks += sends.place(clip_shards(clip, exact), 0, (), (*buckets, STEPPED, build.NORM))
        if layout.layer_norms:
            states = tuple(map(state, range(layout.parameters)))
            tasks += sends.place(sum_norms(exact), 0, (), (*buckets, *states, STEPPED, build.NORM))
        return tasks

    def _gather(self, layout: Layout, sends: CollectiveTasks, key: int) -> list[Task]:
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
