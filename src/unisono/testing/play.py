"""Serial references in one process: every rule, a user's own included, on real tensors, and schedules on any payload.

    rank 0's model ┐
    rank 1's model ┼─ one loop: a task of one rank, a collective of all, ... in any order that the programs allow
    server's centre┘

A collective is run by one thread for each member:

    member 0 ─ act(replica 0, world 0) ┐
    member 1 ─ act(replica 1, world 1) ┼─ all give their tensors, then each sums them in the order of ranks
    member 2 ─ act(replica 2, world 2) ┘

The program of a schedule is played by one thread for each rank, whose transport are queues: any number of ranks in a
test, without MPI.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from unisono.asynchronous.exchange import Centre, Coding, WorkerExchange
from unisono.asynchronous.messages import Reply, WorkerProgress
from unisono.errors import ScheduleError
from unisono.rules.asynchronous import BaseAsynchronousRule, serving_programs
from unisono.schedules.pieces import Cut, bounds
from unisono.schedules.schedule import Action, Program
from unisono.step.costs import Costs
from unisono.step.predict import Clock, Member, TaskSpan, play_in_random_order
from unisono.step.program import Step
from unisono.step.rule import BaseRule
from unisono.testing.replica import InProcessReplica
from unisono.transports.arithmetic import Arithmetic, copy_of
from unisono.transports.player import Completion, Move, Rounds, play
from unisono.wires import wire_of


def play_in_process(
    rule: BaseRule,
    replicas: Sequence[InProcessReplica],
    events: Sequence[Step],
    seed: int = 0,
    costs: Costs | None = None,
) -> list[TaskSpan]:
    """Train replicas, one for each rank, by a rule without servers. The order is a random one that the programs allow,
    chosen by `seed`. With `costs`, tasks run in the order of the clock, and their spans are returned."""
    for rank, replica in enumerate(replicas):
        replica.rank = rank
    programs, carry = rule.programs(replicas[0].layout, events), partial(carry_out, replicas)
    if costs is None:
        play_in_random_order(programs, carry, seed)
        return []
    clock = Clock(dict(enumerate(programs)), rule.threads(), lambda _, task: task.operation.price(task, costs), carry)
    return clock.run()


def serve_in_order(
    rule: BaseAsynchronousRule,
    workers: Sequence[InProcessReplica],
    orders: Sequence[Sequence[int]],
    steps: Sequence[int],
    seed: int = 0,
) -> list[Centre]:
    """Train workers by an asynchronous rule, worker w for `steps[w]` steps, with servers that serve in these orders.

        orders    [[0, 2, 1, 0, ...]]      the workers, as each server serves them: what a run's event log holds

    Return the servers' centres. The order of all other tasks is a random one that the programs allow, chosen by `seed`.
    """
    layout = workers[0].layout
    flats = {key: workers[0].read_weights(key) for key in layout.keys}

    def coding(worker: bool) -> Coding:
        return Coding(rule.exchange.wire, worker, {key: flat.clone() for key, flat in flats.items()})

    centres = list[Centre]()
    for server, order in enumerate(orders):
        owned = {key: flats[key].clone() for key in rule.keys_of(server, layout)}
        codings = [coding(False) for _ in workers]
        centre = _OrderedCentre(order, owned, codings.__getitem__)
        centre.reply = Reply(workers=(WorkerProgress(),) * len(workers)).encode()
        centres.append(centre)
    programs = serving_programs(rule, layout, orders)
    for seat, (worker, count) in reversed([*enumerate(zip(workers, steps, strict=True))]):
        worker.rank, worker.exchange = seat, WorkerExchange(len(workers), coding(True))
        programs.insert(0, tuple(task for step in range(count) for task in rule(Step(step), seat, layout)))
    play_in_random_order(programs, partial(carry_out, [*workers, *centres]), seed)
    return centres


class _OrderedCentre(Centre):
    """Centre that knows from an order whom it serves."""

    def __init__(self, order: Sequence[int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._order = iter(order)

    def announce(self, server: int, link: Any) -> None:
        self.worker = next(self._order)
        super().announce(server, link)


class InProcessWorld:
    """World of one of several threads that stand for ranks, and link (`asynchronous/link.py`) of one of two. Sums are
    made in the order of ranks."""

    def __init__(self, rank: int, given: list[Any], barrier: threading.Barrier) -> None:
        """Make one end; `given` is a list with a place for each, and `barrier` is of all."""
        self.rank, self.size, self._given, self._barrier = rank, len(given), given, barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        self._given[self.rank] = value
        self._barrier.wait()
        gathered = list(self._given)
        self._barrier.wait()
        return gathered

    def allreduce(
        self, tensor: torch.Tensor, _: str = "auto", wire: str | None = None, op: str = "sum"
    ) -> torch.Tensor:
        """Sum a tensor over the ranks, in place, and return it. A wire rounds as `direct` does: each chunk twice."""
        if op == "maximum":
            return tensor.copy_(torch.stack(self.all_gather_object(tensor.clone())).amax(0))
        return tensor.copy_(self._rounded(self._sum(tensor, wire), wire))

    def reduce_scatter(self, tensor: torch.Tensor, _: str = "auto", wire: str | None = None) -> torch.Tensor:
        """Return this rank's chunk of the sum over the ranks. A wire rounds each term."""
        return self._sum(tensor, wire)[slice(*bounds(len(tensor), self.size, self.rank))]

    def all_to_all(self, tensor: torch.Tensor, _: str = "auto") -> torch.Tensor:
        return torch.cat([sent.chunk(self.size)[self.rank] for sent in self.all_gather_object(tensor.clone())])

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, _: str = "auto") -> torch.Tensor:
        return out.copy_(torch.cat(self.all_gather_object(shard.clone())))

    def _sum(self, tensor: torch.Tensor, wire: str | None) -> torch.Tensor:
        return sum(self.all_gather_object(self._rounded(tensor.clone(), wire)), torch.zeros_like(tensor))

    def _rounded(self, tensor: torch.Tensor, wire: str | None) -> torch.Tensor:
        """Return a tensor whose chunks have been through a wire, in place."""
        if (encoding := wire_of(wire, tensor.dtype)) is not None:
            for rank in range(self.size):
                chunk = tensor.view(-1)[slice(*bounds(tensor.numel(), self.size, rank))]
                encoding.encode(chunk.numpy(), torch.empty(encoding.nbytes(len(chunk)), dtype=torch.uint8).numpy())
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        return tensor.copy_(self.all_gather_object(tensor.clone())[root])

    def reduce(self, tensor: torch.Tensor, root: int = 0) -> None:
        total = self.allreduce(tensor.clone())
        if self.rank == root:
            tensor.copy_(total)

    def barrier(self) -> None:
        self.all_gather_object(None)

    def swap(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        received.copy_(self.all_gather_object(sent.clone())[1 - self.rank])

    def announce(self, header: torch.Tensor) -> None:
        """Send nothing: whom a server serves next is given in one process."""

    def send(self, tensor: torch.Tensor) -> None:
        self.all_gather_object(tensor.clone())

    def receive(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.all_gather_object(None)[1 - self.rank])


def carry_out(replicas: Sequence[Any], together: Sequence[Member]) -> None:
    """Run a task; a collective runs with a thread for each member. Raises what a member raises."""
    first = together[0]
    if first.task.operation.act is None:
        replicas[first.rank].outside(first.task)
        return
    given, barrier = list[Any]([None] * len(together)), threading.Barrier(len(together))

    def act_on(place: int) -> None:
        member = together[place]
        try:
            with torch.no_grad():
                member.task.operation.act(replicas[member.rank], member.task, InProcessWorld(place, given, barrier))  # type: ignore[misc]
        except BaseException:  # whatever it is, the others must not wait for this one
            barrier.abort()
            raise

    if len(together) == 1:
        act_on(0)
    else:
        run_ranks(len(together), act_on, threading.BrokenBarrierError)


# Schedules: threads as a transport ------------------------------------------------------------------------------------

STUCK_SECONDS = 30.0
"""Seconds without a message after which a play counts as stuck."""


Queues = dict[tuple[int, int, int], SimpleQueue[Any]]
"""Messages between threads: (from, to, ticket) -> messages, oldest first."""


class ThreadTransport:
    """Transport through queues that all ranks share; `payload` is a flat view."""

    copies = False

    def __init__(self, queues: Queues, rank: int, payload: Any, arithmetic: Arithmetic) -> None:
        self._queues, self._rank, self._payload, self._arithmetic = queues, rank, payload, arithmetic
        self._sent: list[Completion] = []
        self._receives: list[tuple[int, Move]] = []

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Put copies of the sent data into the queues."""
        for move in moves:
            if move.action is Action.SEND:
                data = copy_of(self._arithmetic, self._payload[move.region])
                self._find(self._rank, move.peer, ticket).put(data)
                self._sent.append(Completion(ticket, move.position))
            else:
                self._receives.append((ticket, move))

    def completed(self) -> list[Completion]:
        """Receive available messages, in the order of the moves of each peer and ticket; return the completed moves."""
        done, self._sent = self._sent, []
        still, empty = list[tuple[int, Move]](), set[tuple[int, int]]()
        for ticket, move in self._receives:
            queue = self._find(move.peer, self._rank, ticket)
            if (move.peer, ticket) in empty or queue.empty():
                empty.add((move.peer, ticket))
                still.append((ticket, move))
                continue
            data = queue.get_nowait()
            if move.action is Action.RECEIVE:
                self._payload[move.region] = data
                done.append(Completion(ticket, move.position))
            else:
                done.append(Completion(ticket, move.position, data))
        self._receives = still
        return done

    def _find(self, sender: int, receiver: int, ticket: int) -> SimpleQueue[Any]:
        """Return the queue between two ranks; whichever thread asks first makes it.

        `setdefault` is one step for all threads. A `defaultdict` is not: sender and receiver could each make a queue.
        """
        key = (sender, receiver, ticket)
        return self._queues.get(key) or self._queues.setdefault(key, SimpleQueue())

    def release(self, ticket: int, position: int) -> None:
        """Do nothing: received data is a copy."""


def play_all(
    programs: Sequence[Program],
    cut: Callable[[int], Cut],
    payloads: Sequence[Any],
    arithmetic: Arithmetic,
    in_flight: int = 4,
) -> None:
    """Play every rank's program on its payload, one thread per rank. `cut` returns the cut for a number of chunks."""
    queues: Queues = {}

    def run_rank(rank: int) -> None:
        transport = ThreadTransport(queues, rank, payloads[rank], arithmetic)
        rounds = Rounds(rank, payloads[rank], arithmetic, [transport] * len(programs), partial(_wait, rank))
        play(programs[rank], cut(programs[rank].chunks), rounds, in_flight)

    run_ranks(len(programs), run_rank, ScheduleError)


def run_ranks(ranks: int, run: Callable[[int], None], consequence: type[Exception]) -> None:
    """Call `run` with each rank, in a thread for each. Raises the error of one; a `consequence` of another's error only
    where there is no other."""
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, consequence)):
        raise error


def _wait(rank: int, poll: Callable[[], list[int]]) -> list[int]:
    """Poll until rounds have ended, and return them; yield the core in between. Raises ScheduleError if none end."""
    give_up = time.monotonic() + STUCK_SECONDS
    while not (ended := poll()):
        if time.monotonic() > give_up:
            raise ScheduleError(f"rank {rank} waits forever")
        os.sched_yield()
    return ended
