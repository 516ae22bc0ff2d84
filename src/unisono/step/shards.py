"""Operations on shards of buckets: each rank sums, updates and gathers its own p-th (PCL-DNN section 3.4).

    bucket, 4 ranks      rank 0      rank 1      rank 2      rank 3
    pack                 g0 g0 g0 g0 │ g1 g1 g1 g1 │ ...                 gradients of each rank, whole
    reduce_scatter       G  .  .  .  │ .  G  .  .  │ .  .  G  .  │ ...   their sum, a shard
    update               W  .  .  .  │ .  W  .  .  │ .  .  W  .  │ ...   new weights in its place
    all_gather           W  W  W  W  │ W  W  W  W  │ ...                 whole again
    unpack               weights of the model

Beside them go flags, 4 bytes for each parameter in a bucket: a parameter without a gradient on any rank is not updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from unisono.errors import StepError
from unisono.schedules.pieces import bounds
from unisono.step.costs import Costs, Duration, free, half_exchange, small_exchange
from unisono.step.operations import sum_of_buckets
from unisono.step.program import Operation, Role, Task
from unisono.step.symbolic_state import BucketContents, SymbolicState, change_nothing

if TYPE_CHECKING:
    import torch


# Effects on symbolic values -----------------------------------------------------------------------------------------


def _symbolic_reduce_scatter(ranks: Sequence[SymbolicState], task: Task) -> None:
    total = sum_of_buckets(ranks, task)
    for one in ranks:
        shard = {number: found.copy() for number, found in total.items()}
        one.buckets[task.key] = BucketContents(shard, ready=True, whole=False)


def _symbolic_norms(ranks: Sequence[SymbolicState], task: Task) -> None:
    for one in ranks:
        for key in one.layout.keys:
            sent = one.buckets.get(key)
            if sent is None or not sent.ready or len(sent.parts) < len(one.layout.bucket(key).parameters):
                raise StepError(f"rank {one.rank}: {task} takes norms before all of bucket {key} is there, or after")


def _symbolic_update(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    if task.key in one.shards:
        raise StepError(f"rank {one.rank}: {task} updates a shard whose last weights were not unpacked")
    one.shards[task.key] = {
        number: one.apply_apart(number, task.key, one.take(number, task.key, task, shard=True))
        for number in one.layout.bucket(task.key).parameters
    }


def _symbolic_all_gather(ranks: Sequence[SymbolicState], task: Task) -> None:
    for one in ranks:
        if task.key not in one.shards:
            raise StepError(f"rank {one.rank}: {task} gathers a bucket whose shard was not updated")
        if task.key in one.gathered:
            raise StepError(f"rank {one.rank}: {task} gathers a bucket twice")
    for number in ranks[0].layout.bucket(task.key).parameters:
        shards = tuple(one.shards[task.key][number] for one in ranks)
        version = shards[0] if len(set(shards)) == 1 else ranks[0].versions.of("gathered", shards)
        for one in ranks:
            one.gathered.setdefault(task.key, {})[number] = version


def _symbolic_unpack(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    if task.key not in one.gathered:
        raise StepError(f"rank {one.rank}: {task} unpacks a bucket that was not gathered")
    for number, version in one.gathered.pop(task.key).items():
        one.check_read(number, task)
        one.weights[number][task.key] = version
    del one.shards[task.key]


# Costs --------------------------------------------------------------------------------------------------------------


def _price_update(task: Task, costs: Costs) -> Duration:
    return Duration(costs.nbytes(task.key) * costs.computing.update / costs.layout.ranks)


# Work ---------------------------------------------------------------------------------------------------------------


def own_shard(flat: torch.Tensor, world: Any) -> torch.Tensor:
    """Return this rank's shard of a bucket, where it lies."""
    return flat[slice(*bounds(len(flat), world.size, world.rank))]


@cache
def reduce_scatter(algorithm: str = "auto", wire: str | None = None) -> Operation:
    """Return the operation by which each rank gets the sum of its shard of a bucket, in a wire format."""

    def act(replica: Any, task: Task, world: Any) -> None:
        flat = replica.sums(task.key)
        own_shard(flat, world).copy_(world.reduce_scatter(flat, algorithm, wire))
        world.allreduce(replica.shards.presence(task.key))

    return Operation("reduce_scatter", act, _symbolic_reduce_scatter, half_exchange, Role.COLLECTIVE)


@cache
def all_gather(algorithm: str = "auto") -> Operation:
    """Return the operation by which each rank gets the others' shards of a bucket. No wire rounds weights."""

    def act(replica: Any, task: Task, world: Any) -> None:
        flat = replica.sums(task.key)
        world.all_gather(own_shard(flat, world), flat, algorithm)

    return Operation("all_gather", act, _symbolic_all_gather, half_exchange, Role.COLLECTIVE, "g")


@cache
def clip_shards(limit: float) -> Operation:
    """Return the operation that scales all gradients, so that their common norm is at most `limit`: one sum."""

    def act(replica: Any, _: Task, world: Any) -> None:
        replica.shards.clip(limit, world)

    return Operation("clip", act, _symbolic_norms, small_exchange, Role.COLLECTIVE)


SUM_NORMS = Operation(
    "norms",
    lambda replica, _, world: replica.shards.sum_norms(world),
    _symbolic_norms,
    small_exchange,
    Role.COLLECTIVE,
    "l",
)
"""Sum of the squares of whole layers' norms over the ranks, for LARS and LAMB."""

STEP = Operation("step", None, change_nothing, free)
"""Step of the outside program's optimizer: the shards are updated when it has been called."""

AGREE_ON_STEP = Operation(
    "agree_on_step",
    lambda replica, _, world: replica.agree_on_step(world),
    change_nothing,
    small_exchange,
    Role.COLLECTIVE,
    "W",
)
"""Sum of what the ranks say of that step: all have made it, or none, and of the same gradients."""

UPDATE_SHARD = Operation(
    "update", lambda replica, task, _: replica.update_shard(task.key), _symbolic_update, _price_update
)
"""Optimizer's step for this rank's shard of a bucket, whose gradients are replaced by weights."""

UNPACK = Operation(
    "unpack", lambda replica, task, _: replica.unpack_shards(task.key), _symbolic_unpack, free, letter="U"
)
"""Copy of a bucket's gathered weights to its parameters."""
