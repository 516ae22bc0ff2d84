"""Operations of an elastic exchange between a worker and a server (Zhang et al., arXiv:1412.6651).

worker x                     server c
copy_weights                                     x as it is now
announce        ─────▶       announce            worker's step and loss; number of the exchange, requests
swap            ◀────▶       swap                x one way, c the other, at the same time
replied                                          everything has come: a snapshot may be taken of the worker
pull  x -= α (x - c)         move  c += α (x - c)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from unisono.errors import StepError
from unisono.step.costs import Costs, Duration, free, latency
from unisono.step.operations import PACK_WEIGHTS
from unisono.step.program import Operation, Role, Task, Value
from unisono.step.symbolic_state import SymbolicState, change_nothing

REPLY = Value("reply", 0)
"""Replies of all servers to a worker's exchange, and what came with them."""

SENT_BUFFERS = Value("sent buffers", 0)
"""Memory that buffers are sent from."""


def server_value(server: int) -> Value:
    """Return the dummy value that keeps the tasks of one server in order."""
    return Value("server", server)


def header(server: int) -> Value:
    """Return the value of a server's reply."""
    return Value("header", server)


def _symbolic_swap(ranks: Sequence[SymbolicState], task: Task) -> None:
    worker, server = ranks
    if task.key not in worker.buckets:
        raise StepError(f"rank {worker.rank}: {task} sends a bucket in which nothing was copied")
    numbers = worker.layout.bucket(task.key).parameters
    for one in ranks:
        if task.key in one.received:
            raise StepError(f"rank {one.rank}: {task} overwrites a bucket that came and was not used")
    worker.received[task.key] = {number: server.weights[number][task.key] for number in numbers}
    sent = worker.buckets[task.key].parts
    server.received[task.key] = {number: next(iter(sent[number])).version for number in numbers}


def _symbolic_pull(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    centre, packed = one.received.pop(task.key, None), one.buckets.pop(task.key, None)
    if centre is None or packed is None:
        raise StepError(f"rank {one.rank}: {task} pulls weights before the centre has come")
    for number, version in centre.items():
        (sent,) = packed.parts[number]
        if one.weights[number][task.key] != sent.version:
            raise StepError(f"rank {one.rank}: {task} pulls other weights of parameter {number} than were sent")
        one.pulled.setdefault((number, task.key), sent.version)
        one.weights[number][task.key] = one.versions.of("pulled", sent.version, version)


def _symbolic_move(ranks: Sequence[SymbolicState], task: Task) -> None:
    (one,) = ranks
    came = one.received.pop(task.key, None)
    if came is None:
        raise StepError(f"rank {one.rank}: {task} moves the centre, but no weights have come")
    for number, version in came.items():
        one.weights[number][task.key] = one.versions.of("moved", one.weights[number][task.key], version)


def _price_swap(task: Task, costs: Costs) -> Duration:
    """Return the duration of two messages at once: that of one, by the pair's own cost."""
    return Duration(costs.collective.seconds(costs.nbytes(task.key)))


def _act_announce(replica: Any, task: Task, link: Any) -> None:
    assert task.group is not None, "a pair announces itself"
    replica.announce(task.group.number, link)


COPY_WEIGHTS = Operation(
    "copy_weights", lambda replica, task, _: replica.copy_weights(task.key), PACK_WEIGHTS.symbolic, free
)
"""Copy of weights to their bucket."""

COPY_BUFFERS = Operation(
    "copy_buffers", lambda replica, _, __: replica.copy_buffers(), change_nothing, free, letter="n"
)
"""Copy of the model's buffers to the memory they are sent from."""

ANNOUNCE = Operation("announce", _act_announce, change_nothing, latency, Role.COLLECTIVE, "h")
"""Exchange of headers between a worker and a server. A server serves whoever announces itself first."""

SWAP = Operation(
    "swap", lambda replica, task, link: replica.swap(task.key, link), _symbolic_swap, _price_swap, Role.COLLECTIVE, "x"
)
"""Exchange of a bucket between a worker and a server, both ways at once."""

SWAP_BUFFERS = Operation(
    "swap_buffers", lambda replica, _, link: replica.swap_buffers(link), change_nothing, latency, Role.COLLECTIVE, "y"
)
"""Exchange of the model's buffers, both ways at once."""

REPLIED = Operation("replied", lambda replica, _, __: replica.replied(), change_nothing, free)
"""End of a worker's exchange: all has come, nothing is applied yet."""


@cache
def pull(alpha: float) -> Operation:
    """Return the operation that moves a worker's weights by the share `alpha` towards the centre."""
    return Operation("pull", lambda replica, task, _: replica.pull(task.key, alpha), _symbolic_pull, free, letter="l")


@cache
def move(alpha: float) -> Operation:
    """Return the operation that moves the centre by the share `alpha` towards a worker's weights."""
    return Operation("move", lambda replica, task, _: replica.move(task.key, alpha), _symbolic_move, free)


@cache
def move_buffers(alpha: float) -> Operation:
    """Return the operation that moves the centre's buffers by the share `alpha` towards a worker's."""
    return Operation("move_buffers", lambda replica, _, __: replica.move_buffers(alpha), change_nothing, free)
