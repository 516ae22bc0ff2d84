"""EASGD: workers train alone, tied to a centre by an elastic force; nobody waits (Zhang et al., arXiv:1412.6651).

    worker 0   forward  backward  update   forward  backward  update ...
                        └ x0 ─┐  ▲ pull            └ x0 ─┐  ▲
    server                    ▼ c┘                        ▼ c┘          c += α (x0 - c), then c += α (x1 - c), ...
                                    ▲ c┐
    worker 1   forward      backward └ x1 ▼ pull, update ...            x1 -= α (x1 - c)

A worker's x and the server's c cross on the link while the worker computes; c is the centre before this x moves it, and
both ends move by α times the same difference. So gradient and force are both of the same x, as in equation 5 of the
paper. `docs/rules.md` has its options, EAMSGD, events and faults.

4 workers, period = 2, a model of n bytes: each worker sends and receives n bytes in every second step, n / 2 a step;
the server 4 n in two steps, 2 n a step each way. With `servers=2` each of them carries half of that.

    worker x                     server c
    copy_buffers, pack_weights                       x as it is now, and its buffers, if it has some
    announce        ─────▶       announce            worker's step and loss; number of the exchange, requests
    swap_buffers    ◀────▶       swap_buffers        with the first server
    swap            ◀────▶       swap                x one way, c the other, at the same time
    replied                                          everything has come: a snapshot may be taken of the worker
    pull  x -= α (x - c)         move  c += α (x - c), move_buffers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step import build
from unisono.step.costs import Duration
from unisono.step.layout import Layout
from unisono.step.operations import pack_weights, small_collective
from unisono.step.program import (
    COMMUNICATION,
    MAIN,
    UPDATE,
    Arrival,
    Operation,
    RankGroup,
    Role,
    Step,
    StepProgram,
    Task,
    Value,
    bucket,
    thread,
    weights,
)
from unisono.step.symbolic_state import Stage, SymbolicState, each
from unisono.tables import number

REPLY = Value("reply", 0)
"""Replies of all servers to a worker's exchange, and what came with them."""

SENT_BUFFERS = Value("sent buffers", 0)
"""Memory that buffers are sent from."""

server_value = partial(Value, "server")
"""Dummy value that keeps the tasks of one server in order."""

header = partial(Value, "header")
"""Reply of a server."""

# Operations ---------------------------------------------------------------------------------------------------------


def _swap(ranks: Sequence[SymbolicState], task: Task) -> None:
    worker, server = ranks
    sent = worker.contents(task, Stage.WEIGHTS)
    for state in ranks:
        if task.key in state.received:
            raise state.error(task, "overwrites a bucket that came and was not used")
    worker.received[task.key] = {parameter: server.weights[parameter][task.key] for parameter in sent}
    server.received[task.key] = {parameter: state.version for parameter, (state,) in sent.items()}


def _take_received(state: SymbolicState, task: Task) -> Iterable[tuple[int, int]]:
    if (received := state.received.pop(task.key, None)) is None:
        raise state.error(task, f"uses bucket {task.key} of the other end, which has not come")
    return received.items()


@each
def _pull(state: SymbolicState, task: Task) -> None:
    received, packed = _take_received(state, task), state.take_contents(task, Stage.WEIGHTS).parts
    for parameter, version in received:
        (sent,) = packed[parameter]
        if state.weights[parameter][task.key] != sent.version:
            raise state.error(task, f"pulls other weights of parameter {parameter} than were sent")
        state.pulled.setdefault((parameter, task.key), sent.version)
        state.weights[parameter][task.key] = state.versions.of("pulled", sent.version, version)


@each
def _move(state: SymbolicState, task: Task) -> None:
    for parameter, version in _take_received(state, task):
        state.weights[parameter][task.key] = state.versions.of("moved", state.weights[parameter][task.key], version)


def _act_announce(replica: Any, task: Task, link: Any) -> None:
    assert task.group is not None, "a pair announces itself"
    replica.exchange.announce(task.group.number, link)


COPY_BUFFERS = Operation("copy_buffers", lambda replica, _, __: replica.copy_buffers(), letter="n")
"""Copy of the model's buffers to the memory they are sent from."""

ANNOUNCE = small_collective("announce", _act_announce, letter="h")
"""Exchange of headers between a worker and a server. A server serves whoever announces itself first."""

SWAP = Operation(
    "swap",
    lambda replica, task, link: replica.exchange.swap(task.key, replica.bucket(task.key), link),
    _swap,
    lambda task, costs: Duration(costs.collective.seconds(costs.nbytes(task.key))),  # at once, they take that of one
    Role.COLLECTIVE,
    "x",
)
"""Exchange of a bucket between a worker and a server, both ways at once."""

SWAP_BUFFERS = small_collective(
    "swap_buffers", lambda replica, _, link: replica.exchange.swap_buffers(replica.buffers(), link), letter="y"
)
"""Exchange of the model's buffers, both ways at once."""

REPLIED = Operation("replied", lambda replica, _, __: replica.exchange.replied())
"""End of a worker's exchange: all has come, nothing is applied yet."""


@cache
def pull(alpha: float) -> Operation:
    """Return the operation that moves a worker's weights by the share `alpha` towards the centre."""

    def act(replica: Any, task: Task, _: Any) -> None:
        replica.exchange.pull(task.key, replica.bucket(task.key), alpha)
        replica.write_weights(task.key, replica.bucket(task.key))

    return Operation("pull", act, _pull, letter="l")


@cache
def moves(alpha: float) -> tuple[Operation, Operation]:
    """Return the operations that move the centre, and its buffers, by the share `alpha` towards a worker's."""
    return (
        Operation("move", lambda centre, task, _: centre.move(task.key, alpha), _move),
        Operation("move_buffers", lambda centre, _, __: centre.move_buffers(alpha)),
    )


# Rule ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EASGD(BaseAsynchronousRule):
    """EASGD, asynchronous: workers train alone, and exchange with a centre every `period` steps, for `unisono train`.

    In an exchange, the weights of the worker and of the centre move towards each other, each by `alpha` times their
    difference. `servers` keep the centre: the last ranks (`server="rank"`), or threads (`server="thread"`).
    `staleness` bounds the exchanges of others between two of one worker; 0 is no bound. No worker waits for another
    without a bound.
    """

    alpha: float = number(0.5, above=0, at_most=1)
    """Moving rate: share of the difference by which each side moves in an exchange; above 0, at most 1."""

    def follow(self, event: Step, worker: int, layout: Layout) -> build.Followers:
        """Return the tasks that follow buckets: the exchange runs during the backward pass, updates follow it."""
        updates = build.own_updates(layout)
        if self.exchanges(event):
            yield self.due(0), self._send(worker, layout)
            yield build.AT_THE_END, self._pull(layout)
            updates = ((build.AT_THE_END, tasks) for _, tasks in updates)
        yield from updates
        yield build.AT_THE_END, build.wait_for_weights(layout)

    def _send(self, worker: int, layout: Layout) -> Iterator[Task]:
        """Yield the tasks of a worker's exchange with all servers."""
        if layout.buffers:
            yield Task(COPY_BUFFERS, 0, MAIN, (), (SENT_BUFFERS, thread(MAIN)))
        for key in layout.keys:
            bucket_weights = map(weights, layout.bucket(key).parameters)
            yield Task(pack_weights(1), key, UPDATE, (self.gate, *bucket_weights), (bucket(key),))
        for server in range(self.servers):
            yield from self._swap(server, layout, self.pair(worker, server, layout), (self.gate,), (header(server),))

    def _swap(
        self,
        server: int,
        layout: Layout,
        pair: RankGroup,
        gate: tuple[Value, ...] = (),
        announced: tuple[Value, ...] = (),
    ) -> Iterator[Task]:
        """Yield the transfers between a worker and a server, which are the same on both ends."""
        order = server_value(server)
        yield Task(ANNOUNCE, 0, COMMUNICATION, gate, (order, *announced), pair)
        if layout.buffers and server == 0:
            yield Task(SWAP_BUFFERS, 0, COMMUNICATION, (), (order, SENT_BUFFERS), pair)
        for key in self.keys_of(server, layout):
            yield Task(SWAP, key, COMMUNICATION, (), (order, bucket(key)), pair)

    def _pull(self, layout: Layout) -> Iterator[Task]:
        """Yield the tasks that apply a worker's exchange, once all of it has come."""
        came = (*map(bucket, layout.keys), *map(header, range(self.servers)))
        buffers = (SENT_BUFFERS,) if layout.buffers else ()
        yield Task(REPLIED, 0, UPDATE, (*came, *buffers, build.ENDED), (REPLY,))
        for key in layout.keys:
            bucket_weights = map(weights, layout.bucket(key).parameters)
            yield Task(pull(self.alpha), key, UPDATE, (REPLY,), (bucket(key), *bucket_weights))

    def serve(self, event: Arrival, server: int, layout: Layout) -> StepProgram:
        """Return the tasks by which a server serves a worker's exchange."""
        tasks, order = [*self._swap(server, layout, self.pair(event.worker, server, layout))], server_value(server)
        move, move_buffers = moves(self.alpha)
        # the centre moves when all has come: of a worker that dies in an exchange nothing is applied
        tasks += (Task(move, key, UPDATE, (order,), (bucket(key),)) for key in self.keys_of(server, layout))
        if layout.buffers and server == 0:
            tasks.append(Task(move_buffers, 0, UPDATE, (order,), (SENT_BUFFERS,)))
        return tuple(tasks)
