"""Decisions of servers, as pure functions: whom to serve next, and the reply to each exchange.

    arrived   2 0        last exchange of each    0: 4   1: 1   2: 6     staleness 6, exchange 8 is next
                         after it, worker 1 would have missed 2 .. 8: 7 exchanges, so all wait for worker 1

The bound is that of a stale synchronous parallel server (Ho et al. 2013), counted in exchanges.

The state is that of a whole run: it is in each reply, from which a checkpoint takes it, so that a run resumes there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from unisono.asynchronous.messages import KINDS_OF_TIME, Order, Reply, Request, WorkerHeader, WorkerProgress
from unisono.schedules.pieces import bounds


def next_worker(
    arrived: Sequence[int],
    last: Sequence[int],
    exchange: int,
    staleness: int | None = None,
    alive: Collection[int] | None = None,
) -> int | None:
    """Return the worker that a server serves in `exchange`; None where it has to wait for another one.

    `arrived` are the workers that wait, first come first; `last` the number of each worker's last exchange, -1 for
    none. With `staleness`, no living worker may miss more exchanges of others between two of its own: a worker is
    served only if all others can still be served in time after it, one after another.
    """
    if staleness is None:
        return arrived[0] if arrived else None
    living = set(range(len(last)) if alive is None else alive) | set(arrived)
    for worker in arrived:
        latest = sorted(last[other] + 1 + staleness for other in living if other != worker)
        if all(exchange + 1 + place <= limit for place, limit in enumerate(latest)):
            return worker
    return min(arrived, key=lambda worker: last[worker]) if arrived and living == set(arrived) else None


def missed(exchange: int, last: int) -> int:
    """Return the exchanges of others since a worker's last one: the staleness of the centre that it knows."""
    return exchange - last - 1


@dataclass(frozen=True)
class Budget:
    """Length of a run and its checkpoints."""

    samples: int
    """Samples of an epoch: all workers together."""
    epochs: int
    checkpoint_samples: int = 0
    """Samples between two checkpoints within an epoch; 0: none."""


@dataclass(frozen=True)
class RunState:
    """Progress of a run after so many `exchanges`, as its first server knows it."""

    workers: tuple[WorkerProgress, ...]
    exchanges: int = 0
    samples: int = 0
    """Samples that all workers have trained on."""
    epoch: int = 0
    """Number of epochs that have ended."""
    loss: float = 0.0
    """Sum of the loss since then."""
    loss_samples: int = 0
    """Samples of that sum."""
    epoch_began: float = 0.0
    """Seconds of the run when the present epoch began."""
    saving: frozenset[int] = frozenset()
    """Workers that have not yet been ordered to save their state for the checkpoint `cut`."""
    cut: int = 0
    requested: bool = False
    """True where a signal has requested that cut: the launcher sends it to all workers."""
    stopping: bool = False
    """True once workers are ordered to stop."""
    seconds: tuple[tuple[float, ...], ...] = ()
    """Seconds of each kind of time, of each worker."""

    @property
    def steps(self) -> int:
        """Steps of all workers together."""
        return sum(progress.step for progress in self.workers)


def begin(workers: int) -> RunState:
    """Return the state of a run that begins."""
    return RunState((WorkerProgress(),) * workers, seconds=((0.0,) * KINDS_OF_TIME,) * workers)


def resumed_states(replies: Sequence[Reply]) -> tuple[RunState, ...]:
    """Return the state of each server before the exchange that its reply belongs to, for a run that resumes there.

    Each server counts exchanges by itself; the rest is what the first one knows.
    """
    first = replies[0]
    return tuple(
        RunState(
            *(reply.workers, reply.exchanges, first.samples_before, first.epoch, first.loss, first.loss_samples),
            first.elapsed - first.epoch_seconds,
            seconds=(first.seconds,) * len(first.workers),
        )
        for reply in replies
    )


def resized(states: Sequence[RunState], workers: int, servers: int) -> tuple[RunState, ...]:
    """Return the states of `servers` servers for a run that resumes with another number of workers or servers.

    A server that there was before goes on with its numbers; a new one begins with 0. The workers share the steps made
    so far, so that the names of checkpoints go on. They begin afresh.
    """
    first = states[0]
    shares = [bounds(first.steps, workers, worker) for worker in range(workers)]
    progress = tuple(WorkerProgress(last - start) for start, last in shares)
    plain = replace(first, exchanges=0, workers=progress, seconds=first.seconds[:1] * workers)
    counts = [state.exchanges for state in states[:servers]] + [0] * (servers - len(states))
    return tuple(afresh(replace(plain, exchanges=count), range(workers)) for count in counts)


def afresh(state: RunState, workers: Collection[int]) -> RunState:
    """Return the state in which `workers` begin at the centre: they have missed no exchange, as if the last one had
    been theirs. So a bound of staleness neither breaks nor waits for what they did before."""
    exchange, progress = state.exchanges - 1, enumerate(state.workers)
    renewed = (known._replace(exchange=exchange) if worker in workers else known for worker, known in progress)
    return replace(state, workers=tuple(renewed))


def reply_of(
    state: RunState,
    elapsed: float,
    samples: int,
    orders: Order,
    ended: int,
    cut: int,
    seconds: Sequence[Sequence[float]],
) -> Reply:
    """Return the reply of a server in this state, after `samples` samples and so many seconds of the run; `seconds` are
    those of each kind of time, of each worker."""
    means = tuple(sum(kind) / len(seconds) for kind in zip(*seconds, strict=True))
    before = (state.epoch, ended, state.loss, state.loss_samples, cut, elapsed, elapsed - state.epoch_began)
    return Reply(state.exchanges, samples, state.samples, orders, *before, means, state.workers)


def answer(
    state: RunState, worker: int, header: WorkerHeader, budget: Budget, elapsed: float, due: bool = False
) -> tuple[RunState, Reply]:
    """Return the state after a worker's exchange, and the reply to it.

    `elapsed` is the seconds of the run; `due`: True where a checkpoint is due by the clock.
    """
    samples = state.samples + header.samples
    seconds = (*state.seconds[:worker], header.seconds, *state.seconds[worker + 1 :])
    epoch = min(samples // budget.samples, budget.epochs)
    finished = samples >= budget.samples * budget.epochs
    ends = epoch > state.epoch and not state.stopping and not finished  # the last epoch ends with the final centre
    interval = budget.checkpoint_samples
    passed = bool(interval) and samples // interval > state.samples // interval
    known = Request.SAVE if state.requested and worker in state.saving else Request.NONE
    cuts = not state.stopping and (ends or passed or due or header.request > known)
    saving = frozenset(range(len(state.workers))) if cuts else state.saving
    cut = state.steps - state.workers[worker].step + header.step if cuts else state.cut
    stopping = state.stopping or finished or header.request is Request.STOP
    orders = Order.SAVE if worker in saving else Order.NONE
    orders |= (Order.CENTRE if cuts else Order.NONE) | (Order.STOP if stopping else Order.NONE)
    reply = reply_of(state, elapsed, samples, orders, epoch if ends else 0, cut, seconds)
    served = WorkerProgress(header.step, state.exchanges)
    after = replace(
        state,
        workers=(*state.workers[:worker], served, *state.workers[worker + 1 :]),
        exchanges=state.exchanges + 1,
        samples=samples,
        epoch=epoch if ends else state.epoch,
        loss=0.0 if ends else state.loss + header.loss,
        loss_samples=0 if ends else state.loss_samples + header.samples,
        epoch_began=elapsed if ends else state.epoch_began,
        saving=saving - {worker},
        cut=cut,
        requested=header.request > Request.NONE if cuts else state.requested,
        stopping=stopping,
        seconds=seconds,
    )
    return after, reply
