"""The step as the engine will carry it out, task by task, on a clock: the tasks are the embedding's own.

    main            ──backward────────▶│    waits for w0  │──forward──▶
    communication      │ exchange 3 │ exchange 2 │ exchange 1 │              a thread for each communicator, one link
    update                          │ update 3 │ ...                         one thread

Each task begins when its thread is free, what it reads and mutates is there, and it has been handed over. Exchanges
that go on at once share the link: together they are no faster than one after another, but for their latency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from unisono.engine.embeddings import MAIN, Embedding, Tag, Task, buffer
from unisono.plan.computing import Computing, Cost, Load, Prediction

STEPS = 4
"""Steps that are played; the last one counts, as the first finds nothing under way."""


class _Clock:
    """When threads, tags and the link are free, while tasks are handed over one after another."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.main = self.link = self.exchanging = 0.0
        self.threads: defaultdict[int, float] = defaultdict(float)  # those that exchange, by communicator
        self.tags: defaultdict[Tag, float] = defaultdict(float)

    def carry_out(self, tasks: Iterable[Task], given: float, nbytes: int) -> None:
        """Tasks of a key that are handed over at the time `given`; what is the main thread's, it carries out itself."""
        self.main = max(self.main, given)
        for task in tasks:
            start = max([given, *(self.tags[tag] for tag in (*task.read, *task.mutate))])
            if task.kind == MAIN:
                start = max(start, self.main)
            if task.what == "exchange":
                end = self._exchange(max(start, self.threads[task.communicator]), nbytes)
                self.threads[task.communicator] = end
            else:  # a gradient is packed and unpacked in no time, beside that of an exchange
                end = start + (self.cost.latency if task.what == "barrier" else 0.0)
            self.tags |= dict.fromkeys(task.mutate, end)
            if task.kind == MAIN:
                self.main = given = end

    def _exchange(self, start: float, nbytes: int) -> float:
        alone = self.cost.seconds(nbytes)
        self.link = max(start + alone, self.link + nbytes * self.cost.a_byte)
        self.exchanging += alone
        return self.link


def predict(
    computing: Computing, loads: Sequence[Load], cost: Cost, embedding: Embedding, outstanding: int, deferred: bool
) -> Prediction:
    """What a step takes with buckets `loads`, in their order of exchange, each of which takes `cost`.

    `deferred` says that the next forward pass begins when the backward pass has ended, and waits for each parameter
    when it needs it; else it begins when all is exchanged. `outstanding` exchanges may go on at once where the
    embedding has several communicators.
    """
    clock = _Clock(cost)
    by_main = any(task.kind == MAIN for task in _tasks(embedding, outstanding, outstanding))
    updated = dict.fromkeys(range(len(computing.needed)), 0.0)
    begins, exchanging, updating = [0.0], [0.0], 0.0
    for _ in range(STEPS):
        late = _forward(computing, updated, begins[-1])
        first = computing.whole if embedding.after else min(computing.ready, default=0.0)
        clock.carry_out(_tasks(embedding, 0, outstanding), late + first, 0)
        for key, load in enumerate(loads, 1):
            full = late + (computing.whole if embedding.after else max(computing.ready[one] for one in load.parameters))
            clock.carry_out(_tasks(embedding, key, outstanding), full, load.nbytes)
            if by_main and not deferred:  # the thread that computes is the one that is held up
                late += max(0.0, clock.main - full)
            updating = max(clock.tags[buffer(key)], updating) + load.nbytes * computing.update
            updated |= dict.fromkeys(load.parameters, updating)
        end = max(late + computing.whole, clock.main if by_main else 0.0)
        begins.append(end if deferred else max([end, *updated.values()]))
        exchanging.append(clock.exchanging)
    step, communicating = (times[-1] - times[-2] for times in (begins, exchanging))
    return Prediction(step, communicating, step - computing.whole)


def _forward(computing: Computing, updated: Mapping[int, float], begin: float) -> float:
    """By how much the clock is ahead of the computing when the backward pass begins: all parameters are there then."""
    late = begin
    for parameter in sorted(updated, key=lambda number: computing.needed[number]):
        late = max(late, updated[parameter] - computing.needed[parameter])
    return late


def _tasks(embedding: Embedding, key: int, outstanding: int) -> list[Task]:
    return [*embedding.push(key, outstanding), *embedding.pull(key, outstanding)]
