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
from typing import Any, Protocol

from unisono.errors import StepError
from unisono.step.costs import Costs, Duration
from unisono.step.operations import PACK_WEIGHTS
from unisono.step.prices import free, latency
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


class ElasticReplica(Protocol):
    """Interface of a worker or a server that the operations act on. A link carries messages to the other of the two."""

    def copy_weights(self, key: int) -> None:
        """Copy weights to their bucket. Worker."""

    def copy_buffers(self) -> None:
        """Copy the model's buffers to the memory they are sent from. Worker."""

    def announce(self, server: int, link: Any) -> None:
        """Exchange headers with a server. The worker's has come already, when the server chose it."""

    def swap(self, key: int, link: Any) -> None:
        """Send this end's bucket and receive the other's, at the same time."""

    def swap_buffers(self, link: Any) -> None:
        """Send this end's buffers and receive the other's, at the same time."""

    def replied(self) -> None:
        """Note that all servers have replied, before any weight changes. Worker."""

    def pull(self, key: int, alpha: float) -> None:
        """Move the weights of a bucket by the share `alpha` towards the centre that came. Worker."""

    def move(self, key: int, alpha: float) -> None:
        """Move the centre by the share `alpha` towards the weights that came. Server."""

    def move_buffers(self, alpha: float) -> None:
        """Move the centre's buffers by the share `alpha` towards those that came. Server."""


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


def _act_copy_weights(replica: ElasticReplica, task: Task, _: Any) -> None:
    replica.copy_weights(task.key)


def _act_copy_buffers(replica: ElasticReplica, _: Task, __: Any) -> None:
    replica.copy_buffers()


def _act_announce(replica: ElasticReplica, task: Task, link: Any) -> None:
    assert task.group is not None, "a pair announces itself"
    replica.announce(task.group.number, link)


def _act_swap(replica: ElasticReplica, task: Task, link: Any) -> None:
    replica.swap(task.key, link)


def _act_swap_buffers(replica: ElasticReplica, _: Task, link: Any) -> None:
    replica.swap_buffers(link)


def _act_replied(replica: ElasticReplica, _: Task, __: Any) -> None:
    replica.replied()


COPY_WEIGHTS = Operation("copy_weights", _act_copy_weights, PACK_WEIGHTS.symbolic, free)
"""Copy of weights to their bucket."""

COPY_BUFFERS = Operation("copy_buffers", _act_copy_buffers, change_nothing, free, letter="n")
"""Copy of the model's buffers to the memory they are sent from."""

ANNOUNCE = Operation("announce", _act_announce, change_nothing, latency, Role.COLLECTIVE, "h")
"""Exchange of headers between a worker and a server. A server serves whoever announces itself first."""

SWAP = Operation("swap", _act_swap, _symbolic_swap, _price_swap, Role.COLLECTIVE, "x")
"""Exchange of a bucket between a worker and a server, both ways at once."""

SWAP_BUFFERS = Operation("swap_buffers", _act_swap_buffers, change_nothing, latency, Role.COLLECTIVE, "y")
"""Exchange of the model's buffers, both ways at once."""

REPLIED = Operation("replied", _act_replied, change_nothing, free)
"""End of a worker's exchange: all has come, nothing is applied yet."""


@cache
def pull(alpha: float) -> Operation:
    """Return the operation that moves a worker's weights by the share `alpha` towards the centre."""

    def act(replica: ElasticReplica, task: Task, _: Any) -> None:
        replica.pull(task.key, alpha)

    return Operation("pull", act, _symbolic_pull, free, letter="l")


@cache
def move(alpha: float) -> Operation:
    """Return the operation that moves the centre by the share `alpha` towards a worker's weights."""

    def act(replica: ElasticReplica, task: Task, _: Any) -> None:
        replica.move(task.key, alpha)

    return Operation("move", act, _symbolic_move, free)


@cache
def move_buffers(alpha: float) -> Operation:
    """Return the operation that moves the centre's buffers by the share `alpha` towards a worker's."""

    def act(replica: ElasticReplica, _: Task, __: Any) -> None:
        replica.move_buffers(alpha)

    return Operation("move_buffers", act, change_nothing, free)
