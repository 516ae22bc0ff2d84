"""Operations that rules share. A rule may add others: an `Operation` has everything that readers need.

outside     begin, forward, backward, end, wait: what the program outside does with its batch
gradients   agree (control word), pack, allreduce, settle, clip, update; update_alone for a rank's own
shards      reduce_scatter, all_gather
weights     pack_weights, unpack_weights
others      barrier, broadcast_buffers, send, receive, receive_any
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from unisono.errors import StepError
from unisono.schedules.pieces import bounds
from unisono.step.costs import Costs, Duration
from unisono.step.program import Act, Operation, Role, Task
from unisono.step.replica import Replica
from unisono.step.symbols import Contribution, Sent, Symbols, summed

# What the program outside does --------------------------------------------------------------------------------------


def _mean_begin(ranks: Sequence[Symbols], _: Task) -> None:
    (one,) = ranks
    one.batch += 1


def _mean_forward(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    if not any(value.kind == "weights" for value in task.reads):
        raise StepError(f"rank {one.rank}: {task} reads no weights, so that it waits for no update of them")
    one.seen[task.key] = one.version(task.key)


def _mean_backward(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    one.begun = one.batch
    for number in task.parameters:
        one.made[number] = one.batch
        if number not in one.seen:
            raise StepError(
                f"rank {one.rank}: {task} makes a gradient of parameter {number}, whose weights no forward has read"
            )
        contribution = Contribution(one.rank, one.batch, one.seen.pop(number))
        parts = one.gradients.setdefault(number, {})
        for key in one.parts_of(number):
            mine = Counter() if one.batch in one.absent else Counter({contribution: 1})
            parts[key] = summed((parts.get(key, Counter()), mine))


def _mean_wait(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    if any(value.kind == "weights" for value in task.writes):
        _apply(one, task)


def _nothing(_: Sequence[Symbols], __: Task) -> None:
    """Change no symbol."""


BEGIN = Operation("begin", None, _mean_begin, lambda _, costs: Duration(costs.forward[-1]))
"""Start of a step: its batch is ready."""

FORWARD = Operation("forward", None, _mean_forward, lambda task, costs: Duration(costs.forward[task.key]))
"""Reading of parameter `key` by a module, and computing until the next is read."""

BACKWARD = Operation("backward", None, _mean_backward, lambda task, costs: Duration(costs.backward[task.key]))
"""Computing until bucket `key` is full; for key 0, until the first gradient is ready."""

END = Operation("end", None, _nothing, lambda _, costs: Duration(costs.backward[-1]))
"""End of the backward pass."""

WAIT = Operation("wait", None, _mean_wait, lambda _, __: Duration(0.0))
"""Wait of the outside program for the values that the task reads. It then updates the weights that the task writes."""

# Gradients ----------------------------------------------------------------------------------------------------------


def _mean_agree(ranks: Sequence[Symbols], _: Task) -> None:
    for one in ranks:
        one.word = one.begun


def _mean_pack(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    parts = {}
    for number in one.layout.bucket(task.key).parameters:
        if one.word != one.made.get(number):
            raise StepError(f"rank {one.rank}: {task} has no control word of its step, which says what gradients weigh")
        found = one.gradients.get(number, {}).pop(task.key, None)
        if found is None:
            raise StepError(f"rank {one.rank}: {task} packs the gradient of parameter {number}, which is not there")
        parts[number] = found
    one.buckets[task.key] = Sent(parts)


def _mean_allreduce(ranks: Sequence[Symbols], task: Task) -> None:
    total = _sum_of(ranks, task)
    for one in ranks:
        one.buckets[task.key] = Sent({number: Counter(found) for number, found in total.items()})


def _mean_reduce_scatter(ranks: Sequence[Symbols], task: Task) -> None:
    total = _sum_of(ranks, task)
    for one in ranks:
        shard = {number: Counter(found) for number, found in total.items()}
        one.buckets[task.key] = Sent(shard, settled=True, whole=False)


def _mean_all_gather(ranks: Sequence[Symbols], task: Task) -> None:
    for number in ranks[0].layout.bucket(task.key).parameters:
        shards = {one.weights[number][task.key] for one in ranks}
        version = shards.pop() if len(shards) == 1 else ranks[0].versions.of("gathered", frozenset(shards))
        for one in ranks:
            one.weights[number][task.key] = version


def _sum_of(ranks: Sequence[Symbols], task: Task) -> dict[int, Counter[Contribution]]:
    for one in ranks:
        if task.key not in one.buckets:
            raise StepError(f"rank {one.rank}: {task} sends a bucket in which nothing was packed")
    return {
        number: summed(one.buckets[task.key].parts[number] for one in ranks)
        for number in ranks[0].layout.bucket(task.key).parameters
    }


def _mean_settle(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    if task.key not in one.buckets:
        raise StepError(f"rank {one.rank}: {task} settles a bucket in which nothing was packed")
    one.buckets[task.key].settled = True


def _mean_clip(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    for key in one.layout.keys:
        sent = one.buckets.get(key)
        if sent is None or not sent.settled or len(sent.parts) < len(one.layout.bucket(key).parameters):
            raise StepError(f"rank {one.rank}: {task} takes the norm before all of bucket {key} is there, or after")


def _mean_clip_alone(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    missing = [number for number in range(one.layout.parameters) if number not in one.gradients]
    if missing:
        raise StepError(f"rank {one.rank}: {task} takes the norm without the gradients of parameters {missing}")


def _apply(one: Symbols, task: Task) -> None:
    for number in task.parameters:
        for key in one.parts_of(number):
            one.apply(number, key, one.take(number, key, task))


def _mean_update(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    _apply(one, task)


def _mean_update_shard(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    for number in one.layout.bucket(task.key).parameters:
        one.apply(number, task.key, one.take(number, task.key, task))


def _mean_update_alone(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    for number in task.parameters:
        parts = one.gradients.pop(number, None)
        if parts is None:
            raise StepError(f"rank {one.rank}: {task} applies the gradient of parameter {number}, which is not there")
        for key, found in parts.items():
            one.apply(number, key, found)


def _price_update(task: Task, costs: Costs) -> Duration:
    layout = costs.layout
    keys = (key for number in task.parameters for key in layout.keys_of[number])
    return Duration(
        sum(costs.nbytes(key) / len(layout.bucket(key).parameters) for key in keys) * costs.computing.update
    )


def _free(_: Task, __: Costs) -> Duration:
    """Return a duration of 0: next to a collective, work in a rank's own memory takes no time."""
    return Duration(0.0)


def _price_whole(task: Task, costs: Costs) -> Duration:
    return costs.exchange(costs.nbytes(task.key))


def _price_half(task: Task, costs: Costs) -> Duration:
    """Return half the duration of an allreduce: each byte is sent once."""
    return costs.exchange(costs.nbytes(task.key) / 2)


def _price_small(_: Task, costs: Costs) -> Duration:
    return costs.exchange(0)


def _act_agree(replica: Replica, _: Task, world: Any) -> None:
    replica.agree(world)


def _act_pack(replica: Replica, task: Task, _: Any) -> None:
    replica.pack(task.key)


def _act_settle(replica: Replica, task: Task, _: Any) -> None:
    replica.settle(task.key)


def _act_clip(replica: Replica, _: Task, __: Any) -> None:
    replica.clip()


def _act_clip_alone(replica: Replica, _: Task, __: Any) -> None:
    replica.clip_alone()


def _act_update(replica: Replica, task: Task, _: Any) -> None:
    replica.update(task.parameters)


def _act_update_alone(replica: Replica, task: Task, _: Any) -> None:
    replica.update_alone(task.parameters)


def _act_reduce_scatter(replica: Replica, task: Task, world: Any) -> None:
    flat = replica.bucket(task.key)
    _own_shard(flat, world).copy_(world.reduce_scatter(flat))


def _act_all_gather(replica: Replica, task: Task, world: Any) -> None:
    flat = replica.bucket(task.key)
    world.all_gather(_own_shard(flat, world), flat)


def _own_shard(flat: Any, world: Any) -> Any:
    """Return this rank's shard of a bucket, where it lies."""
    return flat[slice(*bounds(len(flat), world.size, world.rank))]


AGREE = Operation("agree", _act_agree, _mean_agree, _price_small, Role.COLLECTIVE, "w")
"""Sum of the control words: it gives the weight of each rank's gradients, and the requests to all ranks."""

PACK = Operation("pack", _act_pack, _mean_pack, _free)
"""Copy of gradients, times their rank's weight, into their bucket."""

SETTLE = Operation("settle", _act_settle, _mean_settle, _free)
"""Conversion of a bucket's sums to the gradients of its parameters. One without a gradient on any rank gets None."""

CLIP = Operation("clip", _act_clip, _mean_clip, _free)
"""Scaling of all averaged gradients, so that their common norm is at most `Layout.clip`."""

CLIP_ALONE = Operation("clip", _act_clip_alone, _mean_clip_alone, _free)
"""Scaling of all of this rank's own gradients, so that their common norm is at most `Layout.clip`."""

UPDATE = Operation("update", _act_update, _mean_update, _price_update)
"""Optimizer's step for some parameters, with averaged gradients."""

UPDATE_ALONE = Operation("update", _act_update_alone, _mean_update_alone, _price_update)
"""Optimizer's step for some parameters, with this rank's own gradients."""

STEP_ALONE = Operation("step", None, _mean_update_alone, lambda _, __: Duration(0.0))
"""Step of the outside program's optimizer, with this rank's own gradients."""

UPDATE_SHARD = Operation("update", _act_update, _mean_update_shard, _price_update)
"""Optimizer's step for this rank's shard of a bucket."""

REDUCE_SCATTER = Operation("reduce_scatter", _act_reduce_scatter, _mean_reduce_scatter, _price_half, Role.COLLECTIVE)
"""Reduce-scatter: each rank gets the sum of its shard of a bucket."""

ALL_GATHER = Operation("all_gather", _act_all_gather, _mean_all_gather, _price_half, Role.COLLECTIVE, "g")
"""All-gather: each rank gets the others' shards of a bucket."""


@cache
def allreduce(algorithm: str = "auto", wire: str | None = None) -> Operation:
    """Return the operation that sums a bucket over the ranks with an algorithm, in a wire format."""

    def act(replica: Replica, task: Task, world: Any) -> None:
        world.allreduce(replica.bucket(task.key), algorithm, wire)

    return Operation("allreduce", act, _mean_allreduce, _price_whole, Role.COLLECTIVE)


# Weights ------------------------------------------------------------------------------------------------------------


def _mean_pack_weights(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    members = one.layout.bucket(task.key).parameters
    # no batch: parts of a parameter are packed one by one, and the next batch may be there before the last of them
    mine = {n: Counter({Contribution(one.rank, -1, one.weights[n][task.key]): 1}) for n in members}
    one.buckets[task.key] = Sent(mine)


def _mean_unpack_weights(ranks: Sequence[Symbols], task: Task) -> None:
    (one,) = ranks
    if task.key not in one.buckets:
        raise StepError(f"rank {one.rank}: {task} unpacks a bucket in which nothing was packed")
    for number, found in one.buckets.pop(task.key).parts.items():
        doubled = [contribution.rank for contribution, count in found.items() if count > 1]
        missing = set(range(one.layout.ranks)) - {contribution.rank for contribution in found}
        if doubled or missing:
            raise StepError(
                f"rank {one.rank}: {task} averages weights of parameter {number} with ranks {sorted(missing)} missing "
                f"and ranks {doubled} doubled"
            )
        versions = {contribution.version for contribution in found}
        same = versions.pop() if len(versions) == 1 else None
        one.weights[number][task.key] = one.versions.of("mean", frozenset(found.items())) if same is None else same


def _act_pack_weights(replica: Replica, task: Task, _: Any) -> None:
    replica.pack_weights(task.key)


def _act_unpack_weights(replica: Replica, task: Task, _: Any) -> None:
    replica.unpack_weights(task.key)


PACK_WEIGHTS = Operation("pack_weights", _act_pack_weights, _mean_pack_weights, _free, letter="P")
"""Copy of weights, divided by the number of ranks, into their bucket."""

UNPACK_WEIGHTS = Operation("unpack_weights", _act_unpack_weights, _mean_unpack_weights, _free, letter="U")
"""Copy of a bucket's sums to the weights of its parameters."""

# Others -------------------------------------------------------------------------------------------------------------


def _act_barrier(_: Replica, __: Task, world: Any) -> None:
    world.barrier()


def _act_pack_buffers(replica: Replica, _: Task, __: Any) -> None:
    replica.pack_buffers()


def _act_broadcast_buffers(replica: Replica, _: Task, world: Any) -> None:
    world.broadcast(replica.buffers())


def _price_barrier(_: Task, costs: Costs) -> Duration:
    return Duration(costs.collective.latency)


BARRIER = Operation("barrier", _act_barrier, _nothing, _price_barrier, Role.COLLECTIVE, "|")
"""Barrier of all ranks."""

PACK_BUFFERS = Operation("pack_buffers", _act_pack_buffers, _nothing, _free)
"""Copy of the model's present buffers to the memory they are sent from."""

BROADCAST_BUFFERS = Operation("buffers", _act_broadcast_buffers, _nothing, _price_small, Role.COLLECTIVE, "n")
"""Broadcast of rank 0's buffers to all ranks."""


def send(act: Act, mean: Any) -> Operation:
    """Return an operation by which `act` sends a part of the replica to the task's peer."""
    return Operation("send", act, mean, _price_half, Role.SEND)


def receive(act: Act, mean: Any) -> Operation:
    """Return an operation that receives from the task's peer, or from the first sender where it has none."""
    return Operation("receive", act, mean, _price_half, Role.RECEIVE)
