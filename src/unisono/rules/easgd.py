"""EASGD: workers train alone, tied to a centre by an elastic force; nobody waits (Zhang et al., arXiv:1412.6651).

    worker 0   forward  backward  update   forward  backward  update ...
                        └ x0 ─┐  ▲ pull            └ x0 ─┐  ▲
    server                    ▼ c┘                        ▼ c┘          c += α (x0 - c), then c += α (x1 - c), ...
                                    ▲ c┐
    worker 1   forward      backward └ x1 ▼ pull, update ...            x1 -= α (x1 - c)

A worker's x and the server's c cross on the link while the worker computes; c is the centre before this x moves it, and
both ends move by α times the same difference. So gradient and force are both of the same x, as in equation 5 of the
paper. The server answers whoever comes first (Theano-MPI section 4), so that a slow worker delays nobody.

4 workers, period = 2, a model of n bytes: each worker sends and receives n bytes in every second step, n / 2 a step;
the server 4 n in two steps, 2 n a step each way. With `servers=2` each of them carries half of that.
With Nesterov's momentum in the workers' optimizer (`optimizer.nesterov = true`) it is the paper's EAMSGD, but for the
point of the force: here it is x + momentum v, where the gradient is taken, there x.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step import build
from unisono.step.elastic import (
    ANNOUNCE,
    COPY_BUFFERS,
    COPY_WEIGHTS,
    REPLIED,
    REPLY,
    SENT_BUFFERS,
    SWAP,
    SWAP_BUFFERS,
    header,
    move,
    move_buffers,
    pull,
    server_value,
)
from unisono.step.layout import Layout
from unisono.step.program import (
    COMMUNICATION,
    MAIN,
    UPDATE,
    Arrival,
    Step,
    StepProgram,
    Task,
    Value,
    bucket,
    thread,
    weights,
)
from unisono.tables import number


@dataclass(frozen=True)
class EASGD(BaseAsynchronousRule):
    """EASGD, asynchronous: workers train alone, and exchange with a centre every `period` steps, for `unisono train`.

    In an exchange, the weights of the worker and of the centre move towards each other, each by `alpha` times their
    difference. `servers` keep the centre: the last ranks (`server="rank"`), or threads (`server="thread"`).
    `staleness` bounds the exchanges of others between two of one worker; 0 is no bound. No worker waits for another
    without a bound.
    """

    alpha: float = number(0.5, above=0)
    """Moving rate: share of the difference by which each side moves in an exchange; above 0, at most 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1:
            raise UsageError(f"EASGD(alpha={self.alpha}): alpha must be above 0 and at most 1")

    def __call__(self, event: Step, worker: int, layout: Layout) -> StepProgram:
        """Return the tasks of a worker's step."""
        overlap = self.found_overlap
        passing = build.backward(layout, overlap.backward_lane(layout.deferred))
        if not event.synchronize:
            return (*build.forward(layout), *passing)
        updates, waiting = build.own_updates(layout), build.wait_for_own(layout)
        if not self.exchanges(event):
            return (*build.forward(layout), *build.merge(passing, updates), *waiting)
        begin = build.AT_THE_END if overlap.after else 0
        sends = self._send(worker, layout, build.ENDED if overlap.after else build.BEGUN)
        follow = [(begin, sends), (build.AT_THE_END, self._pull(layout))]
        follow += [(build.AT_THE_END, tasks) for _, tasks in updates]
        return (*build.forward(layout), *build.merge(passing, follow), *waiting)

    def _send(self, worker: int, layout: Layout, gate: Value) -> list[Task]:
        """Return the tasks of a worker's exchange with all servers."""
        found, server_of = list[Task](), self.server_of(layout)
        if layout.buffers:
            found.append(Task(COPY_BUFFERS, 0, MAIN, (), (SENT_BUFFERS, thread(MAIN))))
        for key in layout.keys:
            own = tuple(map(weights, layout.bucket(key).parameters))
            found.append(Task(COPY_WEIGHTS, key, UPDATE, (gate, *own), (bucket(key),)))
        for server in range(self.servers):
            group, order = self.pair(worker, server, layout), server_value(server)
            found.append(Task(ANNOUNCE, 0, COMMUNICATION, (gate,), (order, header(server)), group))
            if layout.buffers and server == 0:
                found.append(Task(SWAP_BUFFERS, 0, COMMUNICATION, (), (order, SENT_BUFFERS), group))
            for key in layout.keys:
                if server_of[key] == server:
                    found.append(Task(SWAP, key, COMMUNICATION, (), (order, bucket(key)), group))
        return found

    def _pull(self, layout: Layout) -> list[Task]:
        """Return the tasks that apply a worker's exchange, once all of it has come."""
        came = (*map(bucket, layout.keys), *map(header, range(self.servers)))
        buffers = (SENT_BUFFERS,) if layout.buffers else ()
        found = [Task(REPLIED, 0, UPDATE, (*came, *buffers, build.ENDED), (REPLY,))]
        for key in layout.keys:
            own = tuple(map(weights, layout.bucket(key).parameters))
            found.append(Task(pull(self.alpha), key, UPDATE, (REPLY,), (bucket(key), *own)))
        return found

    def serve(self, event: Arrival, server: int, layout: Layout) -> StepProgram:
        """Return the tasks by which a server serves a worker's exchange."""
        found, order = list[Task](), server_value(server)
        group = self.pair(event.worker, server, layout)
        found.append(Task(ANNOUNCE, 0, COMMUNICATION, (), (order,), group))
        if layout.buffers and server == 0:
            found.append(Task(SWAP_BUFFERS, 0, COMMUNICATION, (), (order, SENT_BUFFERS), group))
        mine = [key for key, its in self.server_of(layout).items() if its == server]
        found += [Task(SWAP, key, COMMUNICATION, (), (order, bucket(key)), group) for key in mine]
        # the centre moves when all has come: of a worker that dies in an exchange nothing is applied
        found += [Task(move(self.alpha), key, UPDATE, (order,), (bucket(key),)) for key in mine]
        if layout.buffers and server == 0:
            found.append(Task(move_buffers(self.alpha), 0, UPDATE, (order,), (SENT_BUFFERS,)))
        return tuple(found)
