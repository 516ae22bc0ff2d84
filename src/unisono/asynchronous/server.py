"""Server of an asynchronous rule: it waits for whoever comes, decides, and carries out the rule's program.

    headers ─▶ arrived ─▶ next_worker ─▶ answer ─▶ rule.serve(Arrival) ─▶ log
                 ▲                                                          │
                 └──────────────────────────────────────────────────────────┘

When all workers have stopped, the first of them fetches the final centre; then all end. In a replay the log of another
run takes the place of next_worker:

    log of another run   2 0 1 0 ...     the next is 2: worker 0 waits, although it came first
    worker 3             is not in it    its exchange is answered, and not applied
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from unisono.asynchronous.decisions import Budget, RunState, answer, missed, next_worker, reply_of
from unisono.asynchronous.event_log import EventLog
from unisono.asynchronous.exchange import Centre
from unisono.asynchronous.link import MpiPort
from unisono.asynchronous.messages import Kind, Order, Reply, Request, WorkerHeader
from unisono.engine import OperationSpan
from unisono.errors import StallError
from unisono.launch import TIMEOUT
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step.layout import Layout
from unisono.step.program import Arrival

POLL_SECONDS = 1e-4
"""Shortest sleep between two looks for workers."""

MAX_POLL_SECONDS = 2e-3
"""Longest sleep between two looks for workers."""

IDLE_SECONDS = 2.0
"""Seconds without any worker after which a server that waits for some looks whether they are stopped."""


@dataclass
class Server:
    """A server, numbered from 0. The first one decides about the run: its end, epochs and checkpoints."""

    rule: BaseAsynchronousRule
    index: int
    layout: Layout
    centre: Centre
    port: MpiPort
    state: RunState
    budget: Budget
    timeout: float = TIMEOUT
    """Seconds after which a worker counts as gone that the others wait for."""
    log: EventLog | None = None
    replay: Replay | None = None
    """Exchanges of another run, which is replayed; None serves whoever comes first."""
    clock: Callable[[], float] = time.perf_counter
    """Function that returns the seconds of the run."""
    due: Callable[[], bool] = lambda: False
    """Function that returns True, once, where a checkpoint is due by the clock."""
    request: Callable[[], Request] = lambda: Request.NONE
    """Function that returns the request of a signal to this process."""
    observe: Callable[[OperationSpan], None] = lambda _: None
    report: Callable[[str], None] = lambda _: None
    """Function that reports a line to the user."""
    gone: set[int] = field(default_factory=set)
    """Workers that have died, or have not come for long after the training had ended."""
    broken: set[int] = field(default_factory=set)
    """Those of them that have stopped within an exchange: one that goes on applies its half, the server nothing."""
    _arrived: dict[int, WorkerHeader] = field(default_factory=dict)  # first come first
    _ended: set[int] = field(default_factory=set)
    _fetching: int | None = None  # who stores the final centre
    _done: bool = False

    def run(self) -> None:
        idle, since = POLL_SECONDS, time.monotonic()
        while not self._done:
            announced = self._collect()
            if self._serve_next() or announced:
                idle, since = POLL_SECONDS, time.monotonic()
                continue
            seconds = time.monotonic() - since
            for worker in sorted(self.port.dead - self.gone):
                self._mark_gone(worker, "has died")
            self._check_replay(seconds)
            self._mark_absent(seconds)
            time.sleep(idle)
            idle = min(MAX_POLL_SECONDS, 1.5 * idle)
        if self.log is not None:
            self.log.close()

    @property
    def stopped(self) -> bool:
        """True where a signal has ended the run before its last epoch."""
        unfinished = self.state.samples < self.budget.samples * self.budget.epochs
        return unfinished and self.replay is None and self.state.stopping

    @property
    def living(self) -> list[int]:
        """Workers that have not died."""
        return [worker for worker in range(len(self.state.workers)) if worker not in self.gone]

    def _collect(self) -> bool:
        """Take in the headers that have been announced. Return True where there was one."""
        announced = False
        while (arrival := self.port.poll()) is not None:
            announced = True
            worker, header = arrival
            if worker in self.gone - self.broken:
                self.gone.discard(worker)
                self.report(f"worker {worker} is back")
            if worker in self.broken and header.kind in (Kind.EXCHANGE, Kind.ENDED):
                self._end_worker(worker, header)
            elif header.kind is Kind.EXCHANGE:
                self._arrived[worker] = header
            elif header.kind is Kind.FETCH:
                self._try(worker, self._send_centre)
            elif header.kind is Kind.ENDED:
                self._ended.add(worker)
                self._order_fetch()
            else:
                self._dismiss(worker)
        return announced

    def _end_worker(self, worker: int, header: WorkerHeader) -> None:
        """End a worker that goes on after it had stopped within an exchange."""
        if header.kind is Kind.EXCHANGE:
            self.report(f"worker {worker} goes on, but had stopped within an exchange, which the centre lacks: it ends")
            self._try(worker, lambda served: self._serve(served, header, applied=False))
        elif self.index == 0:
            self._try(worker, lambda ended: self._send_order(ended, Order.STOP | Order.LEAVE))

    def _serve_next(self) -> bool:
        """Serve the next worker, if it has come. Return True where one was served."""
        waiting, applied = [*self._arrived], True
        if self.replay is not None:
            worker, applied = self.replay.choose(waiting)
        else:
            last = [progress.exchange for progress in self.state.workers]
            living = [worker for worker in self.living if worker not in self._ended]
            worker = next_worker(waiting, last, self.state.exchanges, self.rule.staleness or None, living)
        if worker is None:
            return False
        header = self._arrived.pop(worker)
        self._try(worker, lambda served: self._serve(served, header, applied))
        return True

    def _serve(self, worker: int, header: WorkerHeader, applied: bool) -> None:
        """Reply to a worker and carry out the program of its exchange."""
        began = time.perf_counter()
        due = applied and self.index == 0 and not self.state.stopping and self.due()
        if self.index == 0 and (asked := self.request()) > header.request and not self.state.stopping:
            header = header._replace(request=asked)
        state, reply = answer(self.state, worker, header, self.budget, self.clock(), due)
        if self.index:
            reply = reply._replace(orders=Order.NONE)
        if not applied:
            reply = reply._replace(orders=Order.STOP | (Order.LEAVE if worker in self.broken else Order.NONE))
        self.centre.worker, self.centre.reply = worker, reply.encode()
        program = self.rule.serve(Arrival(self.state.exchanges, worker), self.index, self.layout)
        link = self.port.link(worker)
        for task in program:
            if applied or task.group is not None:
                assert task.operation.act is not None, "a server's program has no tasks of an outside program"
                try:
                    task.operation.act(self.centre, task, link)
                except StallError:  # nothing is applied; all is begun to be sent, as a worker that goes on waits for it
                    applied = link.waits = False
                    self.broken.add(worker)
        if worker in self.broken:
            self.centre.keep_sent()
            self._mark_gone(worker, "has stopped in an exchange")
        if applied:
            self._record(worker, header, reply)
            self.state = state
        span = OperationSpan(f"serve worker {worker}", "server", f"server {self.index}", began, time.perf_counter())
        self.observe(span)

    def _record(self, worker: int, header: WorkerHeader, reply: Reply) -> None:
        if self.replay is not None:
            self.replay.popleft()
        if self.log is not None:
            stale = missed(reply.exchanges, self.state.workers[worker].exchange)
            self.log.add(number=reply.exchanges, worker=worker, sent=header.step, applied=header.step, stale=stale)

    def _try(self, worker: int, act: Callable[[int], None]) -> None:
        """Call `act` with a worker, which may die meanwhile."""
        try:
            act(worker)
        except Exception as error:  # the port knows by which errors a worker is lost; all others are raised again
            if not (self.port.lost(error) or isinstance(error, StallError)):
                raise
            self._mark_gone(worker, "has died" if self.port.lost(error) else "has stopped in an exchange")

    def _send_centre(self, worker: int) -> None:
        """Send the final centre to the worker that fetches it."""
        state, orders = self.state, Order.NONE if self.index else Order.CENTRE
        last = reply_of(state, self.clock(), state.samples, orders, self.budget.epochs, state.steps, state.seconds)
        self.port.link(worker).send(last.encode())
        for key in self.rule.keys_of(self.index, self.layout):
            self.port.link(worker).send(self.centre.flats[key])
        if self.index == 0 and self.centre.flat_buffers is not None:
            self.port.link(worker).send(self.centre.flat_buffers)

    def _order_fetch(self) -> None:
        """Order the first living worker to fetch the final centre, once all have ended."""
        if self.index or self._done or not self.living or not set(self.living) <= self._ended:
            return
        if self._fetching in self.living:  # one that was gone has come back: the other stores the centre
            return
        self._fetching = self.living[0]
        order = Order.CLOSE if self.stopped else Order.FETCH  # a run that a signal has stopped is stored already
        self._try(self.living[0], lambda worker: self._send_order(worker, order))

    def _dismiss(self, first: int) -> None:
        """End the run: the final centre is stored. The other workers leave."""
        if self.index == 0:
            for worker in self.living:
                if worker != first:
                    self._try(worker, lambda other: self._send_order(other, Order.LEAVE))
        self._done = True

    def _send_order(self, worker: int, order: Order) -> None:
        self.port.link(worker).send(Reply(orders=order, workers=self.state.workers).encode())

    def _check_replay(self, seconds: float) -> None:
        """Raise StallError where the worker of the next recorded exchange will not come."""
        if not self.replay:
            return
        worker = self.replay[0]
        if worker in self._ended:
            why = "has ended"
        elif self.port.stopped(worker) and seconds > IDLE_SECONDS:
            why = "is stopped"
        elif seconds > self.timeout:
            why = f"has not come for {seconds:.0f} s"
        else:
            return
        raise self.replay.error(self.index, worker, why, self.state.exchanges)

    def _mark_absent(self, seconds: float) -> None:
        """Count workers as gone that others wait for, at the end or by the bound of staleness, where they are stopped
        or have not come for long."""
        awaited = self.replay is None and (bool(self._arrived) or (self.index == 0 and self.state.stopping))
        if not awaited or seconds < IDLE_SECONDS:
            return
        here = self._ended | self._arrived.keys()
        for worker in self.living:
            if worker not in here and (self.port.stopped(worker) or seconds > self.timeout):
                self._mark_gone(worker, f"is stopped, or has not come for {seconds:.0f} s")

    def _mark_gone(self, worker: int, why: str) -> None:
        if worker in self.gone:
            return
        if self.replay is not None and worker in self.replay:
            raise self.replay.error(self.index, worker, why, self.state.exchanges)
        self.gone.add(worker)
        self._ended.discard(worker)
        self.state = replace(self.state, saving=self.state.saving - {worker})
        self._arrived.pop(worker, None)
        self.report(f"worker {worker} {why}: the others go on without it")
        if self.log is not None:
            self.log.add(died=worker, number=self.state.exchanges)
            if worker in self.broken and self.rule.servers > 1:  # one has its half, another one has not
                inexact = f"worker {worker} stopped within an exchange with one of several servers"
                self.log.add(inexact=inexact, number=self.state.exchanges)
        if self.living:
            self._order_fetch()
        else:
            self._done = True


class Replay(deque[int]):
    """Workers of the exchanges of a log that are still to come at one server, in order."""

    def choose(self, waiting: Sequence[int]) -> tuple[int | None, bool]:
        """Return the worker to serve next of those `waiting`, and False where no such exchange was recorded: it is not
        applied."""
        surplus = next((worker for worker in waiting if worker not in self), None)
        if surplus is not None:
            return surplus, False
        return self[0] if self and self[0] in waiting else None, True

    def error(self, server: int, worker: int, why: str, exchanges: int) -> StallError:
        """Return the error of a recorded worker that does not come; so many `exchanges` were applied."""
        return StallError(
            f"server {server}: the log that is replayed has worker {worker} in exchange "
            f"{exchanges + self.index(worker)}, but it {why}: replay the run again, with all of its workers; "
            "if it is only slow, raise UNISONO_TIMEOUT"
        )
