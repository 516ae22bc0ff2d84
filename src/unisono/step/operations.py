"""Operations that rules share. A rule may add others: an `Operation` has everything that readers need.

outside     begin, forward, backward, grad_input, end, wait: what the program outside does with its batch
            activations: exchanges of layers that are split over ranks
gradients   agree (control messages), pack, allreduce, set_grads, clip, update; UPDATE_LOCAL for a rank's own
weights     pack_weights, unpack_weights
others      barrier, broadcast_buffers, send, receive, receive_any
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from unisono.errors import StepError
from unisono.step.costs import Costs, Duration, free, half_exchange, latency, small_exchange, whole_exchange
from unisono.step.program import Act, Operation, Role, Task
from unisono.step.replica import Replica
from unisono.step.symbolic_state import BucketContents, Contribution, SymbolicState, change_nothing, sum_contributions
from unisono.wires import wire_of

# What the program outside does --------------------------------------------------------------------------------------


def _symbolic_begin(ranks: Sequence[SymbolicState], _: Task) -> None:
    (one,) = ranks
    one.batch += 1


def _symbolic_forward(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    if not any(value.kind == "weights" for value in task.reads):
        raise StepError(f"rank {one.rank}: {task} reads no weights, so that it waits for no update of them")
    one.seen[task.key] = dict(one.weights[task.key])


def _symbolic_backward(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    one.begun = one.batch
    for number in task.parameters:
        one.made[number] = one.batch
        if number not in one.seen:
            raise StepError(
                f"rank {one.rank}: {task} makes a gradient of parameter {number}, whose weights no forward has read"
            )
        seen, parts = one.seen[number], one.gradients.setdefault(number, {})
        for key in one.parts_of(number):
            contribution = Contribution(one.rank, one.batch, seen[key])
            mine = Counter() if one.batch in one.absent else Counter({contribution: 1})
            parts[key] = sum_contributions((parts.get(key, Counter()), mine))


def _symbolic_grad_input(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    for number in task.parameters:
        if one.seen.pop(number, None) != one.weights[number]:
            raise StepError(
                f"rank {one.rank}: {task} reads weights of parameter {number} that are not those of the forward pass: "
                "update them after it"
            )


def _symbolic_wait(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    if any(value.kind == "weights" for value in task.writes):
        _apply(one, task)


BEGIN = Operation("begin", None, _symbolic_begin, lambda _, costs: Duration(costs.forward[-1]))
"""Start of a step: its batch is ready."""

FORWARD = Operation("forward", None, _symbolic_forward, lambda task, costs: Duration(costs.forward[task.key]))
"""Reading of parameter `key` by a module, and computing until the next is read."""

BACKWARD = Operation("backward", None, _symbolic_backward, lambda task, costs: Duration(costs.backward[task.key]))
"""Computing until bucket `key` is full; for key 0, until the first gradient is ready."""

GRAD_INPUT = Operation("grad_input", None, _symbolic_grad_input, lambda _, __: Duration(0.0))
"""Last reading of weights by the backward pass: input gradients that are computed after the gradients of bucket `key`.
Measured times have their seconds in those until the next bucket is full."""

END = Operation("end", None, change_nothing, lambda _, costs: Duration(costs.backward[-1]))
"""End of the backward pass."""

ACTIVATIONS = Operation(
    "activations", None, change_nothing, lambda task, costs: costs.activations[task.key], Role.COLLECTIVE, "x"
)
"""Exchange `key` of activations, or of their gradients, in a group that splits a layer."""

WAIT = Operation("wait", None, _symbolic_wait, lambda _, __: Duration(0.0))
"""Wait of the outside program for the values that the task reads. It then updates the weights that the task writes."""

# Gradients ----------------------------------------------------------------------------------------------------------


def _symbolic_agree(ranks: Sequence[SymbolicState], _: Task) -> None:
    for one in ranks:
        one.control = one.begun


def _symbolic_pack(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    if task.key in one.shards:
        raise StepError(f"rank {one.rank}: {task} overwrites updated weights that were not unpacked")
    parts = {}
    for number in one.layout.bucket(task.key).parameters:
        if one.control != one.made.get(number):
            raise StepError(
                f"rank {one.rank}: {task} has no control message of its step, which gives the weight of gradients"
            )
        found = one.gradients.get(number, {}).pop(task.key, None)
        if found is None:
            raise StepError(f"rank {one.rank}: {task} packs the gradient of parameter {number}, which is not there")
        parts[number] = found
    one.buckets[task.key] = BucketContents(parts)


def _symbolic_allreduce(ranks: Sequence[SymbolicState], task: Task) -> None:
    total = sum_of_buckets(ranks, task)
    for one in ranks:
        one.buckets[task.key] = BucketContents({number: Counter(found) for number, found in total.items()})


def sum_of_buckets(ranks: Sequence[SymbolicState], task: Task) -> dict[int, Counter[Contribution]]:
    """Return the sum of a bucket over ranks, by parameter. Raises StepError where one has packed nothing."""
    for one in ranks:
        if task.key not in one.buckets:
            raise StepError(f"rank {one.rank}: {task} sends a bucket in which nothing was packed")
    return {
        number: sum_contributions(one.buckets[task.key].parts[number] for one in ranks)
        for number in ranks[0].layout.bucket(task.key).parameters
    }


def _symbolic_set_grads(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    if task.key not in one.buckets:
        raise StepError(f"rank {one.rank}: {task} sets gradients from a bucket in which nothing was packed")
    one.buckets[task.key].ready = True


def _symbolic_clip(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    for key in one.layout.keys:
        sent = one.buckets.get(key)
        if sent is None or not sent.ready or len(sent.parts) < len(one.layout.bucket(key).parameters):
            raise StepError(f"rank {one.rank}: {task} takes the norm before all of bucket {key} is there, or after")


def _symbolic_sum_squares(ranks: Sequence[SymbolicState], task: Task) -> None:
    for one in ranks:
        _symbolic_clip([one], task)


def _symbolic_clip_local(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    missing = [number for number in range(one.layout.parameters) if number not in one.gradients]
    if missing:
        raise StepError(f"rank {one.rank}: {task} takes the norm without the gradients of parameters {missing}")


def _apply(one: SymbolicState, task: Task) -> None:
    for number in task.parameters:
        one.check_read(number, task)
        for key in one.parts_of(number):
            one.apply(number, key, one.take(number, key, task))


def _symbolic_update(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    _apply(one, task)


def _symbolic_update_local(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    for number in task.parameters:
        one.check_read(number, task)
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


AGREE = Operation(
    "agree", lambda replica, _, world: replica.agree(world), _symbolic_agree, small_exchange, Role.COLLECTIVE, "w"
)
"""Sum of the control messages: it gives the weight of each rank's gradients, and the requests to all ranks."""

PACK = Operation("pack", lambda replica, task, _: replica.pack(task.key), _symbolic_pack, free)
"""Copy of gradients, times their rank's weight, into their bucket."""

PACK_SUM = Operation("pack", lambda replica, task, _: replica.pack(task.key, scaled=False), _symbolic_pack, free)
"""Copy of gradients as they are into their bucket, which then holds their sum."""

SET_GRADS = Operation("set_grads", lambda replica, task, _: replica.set_grads(task.key), _symbolic_set_grads, free)
"""Conversion of a bucket's sums to the gradients of its parameters. One without a gradient on any rank gets None."""

CLIP = Operation("clip", lambda replica, _, __: replica.clip(), _symbolic_clip, free)
"""Scaling of all averaged gradients, so that their common norm is at most `Layout.clip`."""

SUM_SQUARES = Operation(
    "sum_squares",
    lambda replica, _, world: replica.sum_squares(world),
    _symbolic_sum_squares,
    small_exchange,
    Role.COLLECTIVE,
    "q",
)
"""Sum of the squares of all averaged gradients, where parameters are split: each part counts once."""

CLIP_LOCAL = Operation("clip", lambda replica, _, __: replica.clip_local(), _symbolic_clip_local, free)
"""Scaling of all of this rank's own gradients, so that their common norm is at most `Layout.clip`."""

UPDATE = Operation("update", lambda replica, task, _: replica.update(task.parameters), _symbolic_update, _price_update)
"""Optimizer's step for some parameters, with averaged gradients."""

UPDATE_LOCAL = Operation(
    "update", lambda replica, task, _: replica.update_local(task.parameters), _symbolic_update_local, _price_update
)
"""Optimizer's step for some parameters, with this rank's own gradients."""

STEP_LOCAL = Operation("step", None, _symbolic_update_local, lambda _, __: Duration(0.0))
"""Step of the outside program's optimizer, with this rank's own gradients."""


@cache
def allreduce(algorithm: str = "auto", wire: str | None = None) -> Operation:
    """Return the operation that sums a bucket over the ranks with an algorithm, in a wire format.

    Flags are summed by themselves where numbers of a block share a scale: beside a flag of 1, gradients would vanish.
    """

    def act(replica: Replica, task: Task, world: Any) -> None:
        flat = replica.bucket(task.key)
        encoding = wire_of(wire, flat.dtype)
        if encoding is None or encoding.elementwise:
            world.allreduce(flat, algorithm, wire)
            return
        world.allreduce(replica.sums(task.key), algorithm, wire)
        if len(flags := replica.flags(task.key)):
            world.allreduce(flags)

    return Operation("allreduce", act, _symbolic_allreduce, whole_exchange, Role.COLLECTIVE)


# Weights ------------------------------------------------------------------------------------------------------------


def _symbolic_pack_weights(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    members = one.layout.bucket(task.key).parameters
    # no batch: parts of a parameter are packed one by one, and the next batch may be there before the last of them
    mine = {n: Counter({Contribution(one.rank, -1, one.weights[n][task.key]): 1}) for n in members}
    one.buckets[task.key] = BucketContents(mine)


def check_contributions(one: SymbolicState, task: Task, number: int, found: Counter[Contribution]) -> None:
    """Raise StepError unless a mean of weights, or of their changes, has each rank's contribution once."""
    doubled = [contribution.rank for contribution, count in found.items() if count > 1]
    missing = set(range(one.layout.ranks)) - {contribution.rank for contribution in found}
    if doubled or missing:
        raise StepError(
            f"rank {one.rank}: {task} averages weights of parameter {number} with ranks {sorted(missing)} missing "
            f"and ranks {doubled} doubled"
        )


def _symbolic_unpack_weights(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    if task.key not in one.buckets:
        raise StepError(f"rank {one.rank}: {task} unpacks a bucket in which nothing was packed")
    for number, found in one.buckets.pop(task.key).parts.items():
        check_contributions(one, task, number, found)
        versions = {contribution.version for contribution in found}
        same = versions.pop() if len(versions) == 1 else None
        one.weights[number][task.key] = one.versions.of("mean", frozenset(found.items())) if same is None else same


PACK_WEIGHTS = Operation(
    "pack_weights", lambda replica, task, _: replica.pack_weights(task.key), _symbolic_pack_weights, free, letter="P"
)
"""Copy of weights, divided by the number of ranks, into their bucket."""

UNPACK_WEIGHTS = Operation(
    "unpack_weights",
    lambda replica, task, _: replica.unpack_weights(task.key),
    _symbolic_unpack_weights,
    free,
    letter="U",
)
"""Copy of a bucket's sums to the weights of its parameters."""

# Others -------------------------------------------------------------------------------------------------------------


BARRIER = Operation("barrier", lambda _, __, world: world.barrier(), change_nothing, latency, Role.COLLECTIVE, "|")
"""Barrier of all ranks."""

PACK_BUFFERS = Operation("pack_buffers", lambda replica, _, __: replica.pack_buffers(), change_nothing, free)
"""Copy of the model's present buffers to the memory they are sent from."""

BROADCAST_BUFFERS = Operation(
    "buffers",
    lambda replica, _, world: world.broadcast(replica.buffers()),
    change_nothing,
    small_exchange,
    Role.COLLECTIVE,
    "n",
)
"""Broadcast of rank 0's buffers to all ranks."""


def send(act: Act, symbolic: Any) -> Operation:
    """Return an operation by which `act` sends a part of the replica to the task's peer."""
    return Operation("send", act, symbolic, half_exchange, Role.SEND)


def receive(act: Act, symbolic: Any) -> Operation:
    """Return an operation that receives from the task's peer, or from the first sender where it has none."""
    return Operation("receive", act, symbolic, half_exchange, Role.RECEIVE)
