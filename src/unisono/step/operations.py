"""Operations that rules share. A rule may add others: an `Operation` has everything that readers need.

outside     begin, forward, backward, grad_input, end, wait: what the program outside does with its batch
            activations: exchanges of layers that are split over ranks
gradients   agree (control messages), pack, allreduce, set_grads, clip, update; UPDATE_LOCAL for a rank's own;
            measure and exponents before a pack of integers (wire "exact"); node_sum and node_copy around an allreduce
weights     pack_weights, unpack_weights
others      barrier, pack_buffers, broadcast_buffers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from unisono.step.costs import Costs, Duration, node_exchange, small_exchange, whole_exchange
from unisono.step.program import Operation, Role, SymbolicEffect, Task
from unisono.step.replica import Replica
from unisono.step.symbolic_state import Contents, Contribution, Stage, Sum, SymbolicState, each, sum_buckets
from unisono.wires import wire_of

small_collective = partial(Operation, price=small_exchange, role=Role.COLLECTIVE)
"""Operation of all members together, of almost no bytes."""

# What the program outside does --------------------------------------------------------------------------------------


@each
def _begin(state: SymbolicState, _: Task) -> None:
    state.batch += 1


@each
def _forward(state: SymbolicState, task: Task) -> None:
    if not any(value.kind == "weights" for value in task.reads):
        raise state.error(task, "reads no weights, so that it waits for no update of them")
    state.seen[task.key] = dict(state.weights[task.key])


@each
def _backward(state: SymbolicState, task: Task) -> None:
    state.begun = state.batch
    for parameter in task.parameters:
        state.made[parameter] = state.batch
        if parameter not in state.seen:
            raise state.error(task, f"makes a gradient of parameter {parameter}, whose weights no forward has read")
        seen, parts = state.seen[parameter], state.gradients.setdefault(parameter, {})
        for key in state.parts_of(parameter):
            parts[key] = parts.get(key, Counter()).copy()
            if state.batch not in state.absent:
                parts[key][Contribution(state.rank, state.batch, seen[key])] += 1


@each
def _grad_input(state: SymbolicState, task: Task) -> None:
    for parameter in task.parameters:
        if state.seen.pop(parameter, None) != state.weights[parameter]:
            changed = "that are not those of the forward pass: update them after it"
            raise state.error(task, f"reads weights of parameter {parameter} {changed}")


@each
def _wait(state: SymbolicState, task: Task) -> None:
    if any(value.kind == "weights" for value in task.writes):
        state.apply_averaged(task)


BEGIN = Operation("begin", None, _begin, lambda _, costs: Duration(costs.forward[-1]))
"""Start of a step: its batch is ready."""

FORWARD = Operation("forward", None, _forward, lambda task, costs: Duration(costs.forward[task.key]))
"""Reading of parameter `key` by a module, and computing until the next is read."""

BACKWARD = Operation("backward", None, _backward, lambda task, costs: Duration(costs.backward[task.key]))
"""Computing until bucket `key` is full; for key 0, until the first gradient is ready."""

GRAD_INPUT = Operation("grad_input", None, _grad_input)
"""Last reading of weights by the backward pass: input gradients that are computed after the gradients of bucket `key`.
Measured times have their seconds in those until the next bucket is full."""

END = Operation("end", None, price=lambda _, costs: Duration(costs.backward[-1]))

ACTIVATIONS = Operation(
    "activations", None, price=lambda task, costs: costs.activations[task.key], role=Role.COLLECTIVE, letter="x"
)
"""Exchange `key` of activations, or of their gradients, in a group that splits a layer."""

WAIT = Operation("wait", None, _wait)
"""Wait of the outside program for the values that the task reads. It then updates the weights that the task writes."""

# Gradients ----------------------------------------------------------------------------------------------------------


@each
def _agree(state: SymbolicState, _: Task) -> None:
    state.control = state.begun


@each
def _pack(state: SymbolicState, task: Task) -> None:
    held = state.buckets.get(task.key)
    if held is not None and held.stage in (Stage.UPDATED, Stage.GATHERED):
        raise state.error(task, "overwrites updated weights that were not unpacked")
    state.buckets[task.key] = Contents(Stage.GRADIENTS, _own_gradients(state, task))
    for parameter in state.layout.bucket(task.key).parameters:
        del state.gradients[parameter][task.key]


def _own_gradients(state: SymbolicState, task: Task) -> dict[int, Sum]:
    """Return the gradients of a bucket that this rank has made in the step of its control message."""
    parts: dict[int, Sum] = {}
    for parameter in state.layout.bucket(task.key).parameters:
        if state.control != state.made.get(parameter):
            raise state.error(task, "has no control message of its step, which gives the weight of gradients")
        if (contributions := state.gradients.get(parameter, {}).get(task.key)) is None:
            raise state.error(task, f"packs the gradient of parameter {parameter}, which is not there")
        parts[parameter] = contributions
    return parts


@each
def _measure(state: SymbolicState, task: Task) -> None:
    state.buckets[task.key] = Contents(Stage.MEASURED, _own_gradients(state, task))


def _pack_integers(ranks: Sequence[SymbolicState], task: Task) -> None:
    for state in ranks:
        agreed = state.contents(task, Stage.EXPONENTS)
        for parameter, contributions in _own_gradients(state, task).items():
            if not contributions <= agreed[parameter]:
                unmeasured = "that was not measured: it may not fit the exponents"
                raise state.error(task, f"makes integers of a gradient of parameter {parameter} {unmeasured}")
    _pack(ranks, task)


SUMMED = Stage.GRADIENTS, Stage.WEIGHTS, Stage.CHANGE
"""Stages of buckets that are summed over ranks."""

_sum = sum_buckets(*SUMMED)


def _node_sum(ranks: Sequence[SymbolicState], task: Task) -> None:
    _sum(ranks, task)
    for state in ranks[1:]:
        del state.buckets[task.key]


def _node_copy(ranks: Sequence[SymbolicState], task: Task) -> None:
    parts = ranks[0].contents(task, *SUMMED)
    for state in ranks[1:]:
        state.buckets[task.key] = ranks[0].buckets[task.key]._replace(parts=dict(parts))


@each
def _set_grads(state: SymbolicState, task: Task) -> None:
    state.buckets[task.key] = Contents(Stage.AVERAGED, state.contents(task, Stage.GRADIENTS))


@each
def _clip_local(state: SymbolicState, task: Task) -> None:
    if missing := [parameter for parameter in range(state.layout.parameters) if parameter not in state.gradients]:
        raise state.error(task, f"takes the norm without the gradients of parameters {missing}")


@each
def _update_local(state: SymbolicState, task: Task) -> None:
    for parameter in task.parameters:
        state.check_read(parameter, task)
        if (parts := state.gradients.pop(parameter, None)) is None:
            raise state.error(task, f"applies the gradient of parameter {parameter}, which is not there")
        for key, contributions in parts.items():
            state.weights[parameter][key] = state.update(parameter, key, contributions)


def needs_all(stage: Stage) -> SymbolicEffect:
    """Return the effect of a norm of all gradients, at this stage: it needs all of them, and changes nothing."""

    @each
    def check(state: SymbolicState, task: Task) -> None:
        for key in state.layout.keys:
            if len(state.contents(task, stage, key=key)) < len(state.layout.bucket(key).parameters):
                raise state.error(task, f"takes norms after a part of bucket {key} was applied")

    return check


def _price_update(task: Task, costs: Costs) -> Duration:
    layout = costs.layout
    keys = (key for parameter in task.parameters for key in layout.keys_of[parameter])
    return Duration(
        sum(costs.nbytes(key) / len(layout.bucket(key).parameters) for key in keys) * costs.computing.update
    )


def price_pack(task: Task, costs: Costs) -> Duration:
    """Return the duration of a copy of the task's bucket to the host."""
    return Duration(costs.nbytes(task.key) * costs.computing.pack)


def price_unpack(task: Task, costs: Costs) -> Duration:
    """Return the duration of a copy of the task's bucket from the host."""
    return Duration(costs.nbytes(task.key) * costs.computing.unpack)


AGREE = small_collective("agree", lambda replica, _, world: replica.agree(world), _agree, letter="w")
"""Sum of the control messages: it gives the weight of each rank's gradients, and the requests to all ranks."""

PACK = Operation("pack", lambda replica, task, _: replica.pack(task.key), _pack, price_pack)
"""Copy of gradients, times their rank's weight, into their bucket."""

PACK_SUM = replace(PACK, act=lambda replica, task, _: replica.pack(task.key, scaled=False))
"""Copy of gradients as they are into their bucket, which then holds their sum."""

MEASURE = Operation("measure", lambda replica, task, _: replica.measure(task.key), _measure, price_pack, letter="m")
"""Largest magnitude in each block of a bucket's gradients, times their rank's weight."""

MEASURE_SUM = replace(MEASURE, act=lambda replica, task, _: replica.measure(task.key, scaled=False))
"""The same of gradients as they are."""

EXPONENTS = small_collective(
    "exponents",
    lambda replica, task, world: world.allreduce(replica.maxima(task.key), op="maximum"),
    sum_buckets(Stage.MEASURED, into=Stage.EXPONENTS),
)
"""Maximum of those over the ranks: it gives the exponents of the integers that are packed next."""

EXACT = {
    pack: (measure, replace(pack, symbolic=_pack_integers))
    for pack, measure in ((PACK, MEASURE), (PACK_SUM, MEASURE_SUM))
}
"""Operations that measure and then pack with the wire "exact", by those that pack with any other."""

PACKING = frozenset(operation for pack, pair in EXACT.items() for operation in (pack, *pair))
"""Operations after which the gradients of a bucket may not change."""

SET_GRADS = Operation("set_grads", lambda replica, task, _: replica.set_grads(task.key), _set_grads, price_unpack)
"""Conversion of a bucket's sums to the gradients of its parameters. One without a gradient on any rank gets None."""

CLIP = Operation("clip", lambda replica, _, __: replica.clip(), needs_all(Stage.AVERAGED))
"""Scaling of all averaged gradients, so that their common norm is at most `Layout.clip`."""

SUM_SQUARES = small_collective(
    "sum_squares", lambda replica, _, world: replica.sum_squares(world), needs_all(Stage.AVERAGED), letter="q"
)
"""Sum of the squares of all averaged gradients, where parameters are split: each part counts once."""

CLIP_LOCAL = Operation("clip", lambda replica, _, __: replica.clip_local(), _clip_local)
"""Scaling of all of this rank's own gradients, so that their common norm is at most `Layout.clip`."""

_apply = each(SymbolicState.apply_averaged)

UPDATE = Operation("update", lambda replica, task, _: replica.update(task.parameters), _apply, _price_update)
"""Optimizer's step for some parameters, with averaged gradients."""

UPDATE_WITH_NORMS = Operation(
    "update",
    lambda replica, task, world: replica.update(task.parameters, world),
    _apply,
    lambda task, costs: Duration(_price_update(task, costs).seconds + small_exchange(task, costs).seconds),
    Role.COLLECTIVE,
)
"""Step of an optimizer that needs norms of whole layers (LARS, LAMB), where layers are split: their squares are summed
within it."""

UPDATE_LOCAL = Operation(
    "update", lambda replica, task, _: replica.update_local(task.parameters), _update_local, _price_update
)
"""Optimizer's step for some parameters, with this rank's own gradients."""

STEP_LOCAL = Operation("step", None, _update_local)
"""Step of the outside program's optimizer, with this rank's own gradients."""

WAIT_LOCAL = Operation("wait", None, _update_local)
"""Wait of the outside program of a rank that is alone. It then updates the weights with its own gradients."""


@cache
def allreduce(algorithm: str = "auto", wire: str | None = None) -> Operation:
    """Return the operation that sums a bucket over the ranks of its group with an algorithm, in a wire format.

    Flags are summed by themselves where numbers of a block share a scale: beside a flag of 1, gradients would vanish.
    """

    def act(replica: Replica, task: Task, world: Any) -> None:
        encoding = None if wire is None else wire_of(wire, replica.flags(task.key).dtype)
        if encoding is None or encoding.elementwise:
            for part in replica.arrivals(task.key):
                world.allreduce(part, algorithm, wire)
            return
        world.allreduce(replica.sums(task.key), algorithm, wire)
        if len(flags := replica.flags(task.key)):
            world.allreduce(flags)

    return Operation("allreduce", act, _sum, whole_exchange, Role.COLLECTIVE, parted=True)


def _act_node_sum(replica: Replica, task: Task, world: Any) -> None:
    for part in replica.arrivals(task.key):
        world.reduce(part)


def _act_node_copy(replica: Replica, task: Task, world: Any) -> None:
    for part in replica.arrivals(task.key):
        world.broadcast(part)


NODE_SUM = Operation("node_sum", _act_node_sum, _node_sum, node_exchange, Role.COLLECTIVE, "N")
"""Sum of a bucket over the ranks of a node, in the bucket's own numbers; its first rank has it."""

NODE_COPY = Operation("node_copy", _act_node_copy, _node_copy, node_exchange, Role.COLLECTIVE, "C")
"""Copy of a bucket from the first rank of a node to its others."""


# Weights ------------------------------------------------------------------------------------------------------------


@each
def _unpack_weights(state: SymbolicState, task: Task) -> None:
    for parameter, contributions in state.take_means(task, Stage.WEIGHTS).items():
        versions = {contribution.version for contribution in contributions}
        mean = versions.pop() if len(versions) == 1 else state.versions.of("mean", frozenset(contributions.items()))
        state.weights[parameter][task.key] = mean


@cache
def pack_weights(ranks: int | None = None) -> Operation:
    """Return the operation that copies weights, divided by the number of `ranks` over which they will be summed, into
    their bucket. None for all ranks."""

    def act(replica: Any, task: Task, _: Any) -> None:
        replica.pack_weights(task.key, ranks or replica.layout.ranks)

    @each
    def symbolic(state: SymbolicState, task: Task) -> None:
        # no batch: parts of a parameter are packed one by one, and the next batch may be there before the last of them
        members, key = state.layout.bucket(task.key).parameters, task.key
        own = {index: Counter({Contribution(state.rank, -1, state.weights[index][key]): 1}) for index in members}
        state.buckets[key] = Contents(Stage.WEIGHTS, own, ranks or state.layout.ranks)

    return Operation("pack_weights", act, symbolic, price_pack, letter="P")


UNPACK_WEIGHTS = Operation(
    "unpack_weights",
    lambda replica, task, _: replica.write_weights(task.key, replica.bucket(task.key)),
    _unpack_weights,
    price_unpack,
    letter="U",
)
"""Copy of a bucket's sums to the weights of its parameters."""

# Others -------------------------------------------------------------------------------------------------------------


BARRIER = small_collective("barrier", lambda _, __, world: world.barrier(), letter="|")

PACK_BUFFERS = Operation("pack_buffers", lambda replica, _, __: replica.pack_buffers())
"""Copy of the model's present buffers to the memory they are sent from."""

BROADCAST_BUFFERS = small_collective(
    "buffers", lambda replica, _, world: world.broadcast(replica.buffers()), letter="n"
)
