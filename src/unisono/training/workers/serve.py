"""Makes a server of an asynchronous rule from a trainer's model, and runs it on a rank or in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from unisono.asynchronous.centre import Centre
from unisono.asynchronous.coding import Coding, PlainCoding, ReferenceCoding
from unisono.asynchronous.event_log import EventLog
from unisono.asynchronous.messages import Request
from unisono.asynchronous.port import MpiPort
from unisono.asynchronous.server import Server
from unisono.asynchronous.serving import Budget, RunState
from unisono.reducer.reducer import Reducer
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.training.recipe import Recipe
from unisono.training.timeline import Timeline
from unisono.uncaught import THREAD_PREFIX


@dataclass(frozen=True)
class Serving:
    """Conditions under which a server serves."""

    rule: BaseAsynchronousRule
    number: int
    state: RunState
    home: Path
    began: float
    """Start of the run on `time.perf_counter`, as if it had never stopped."""
    recorded: Sequence[int] | None = None
    """Order of the run that is replayed."""
    processes: Mapping[int, int] = field(default_factory=dict)
    """Processes of the workers on this host, by worker."""


def make_server(
    serving: Serving,
    recipe: Recipe,
    samples: int,
    reducer: Reducer,
    timeline: Timeline | None,
    report: Callable[[str], None],
    request: Callable[[], Request],
) -> Server:
    """Return the server. Its centre has the weights and buffers of the reducer's model."""
    rule, links = serving.rule, reducer.links
    assert links is not None, "the reducer of an asynchronous rule has links"
    layout, flats = reducer.programs.layout(), reducer.weights.flats()
    server_of = rule.server_of(layout)
    mine = {key: flat for key, flat in flats.items() if server_of[key] == serving.number}
    buffers = reducer.buffers
    buffers.pack()
    codings: dict[int, Coding] = {}

    def coding(worker: int) -> Coding:
        if worker not in codings:
            codings[worker] = make_coding(rule, False, {key: one.clone() for key, one in mine.items()})
        return codings[worker]

    for worker in range(links.seats.workers):
        coding(worker)  # before the first exchange moves the centre
    centre = Centre(mine, coding, buffers.flat.clone() if layout.buffers else None, buffers.move)
    training = recipe.training
    budget = Budget(samples, training.epochs, training.checkpoint_every * training.batch)
    return Server(
        *(
            rule,
            serving.number,
            layout,
            centre,
            MpiPort(links.comm, links.seats.workers, links.timeout, serving.processes),
        ),
        *(serving.state, budget, rule.staleness or None),
        clock=lambda: time.perf_counter() - serving.began,
        timeout=links.timeout,
        log=EventLog(serving.home, serving.number),
        recorded=serving.recorded,
        due=_timer(60 * training.checkpoint_minutes),
        request=request,
        observe=(lambda _: None) if timeline is None else timeline.add,
        report=report,
    )


def make_coding(rule: BaseAsynchronousRule, worker: bool, references: dict[int, torch.Tensor]) -> Coding:
    """Return the coding of one end of an exchange."""
    return PlainCoding() if rule.exchange.wire is None else ReferenceCoding(rule.exchange.wire, worker, references)


def _timer(seconds: float) -> Callable[[], bool]:
    """Return a function that is True once in so many seconds; never for 0."""
    last = time.monotonic()

    def due() -> bool:
        nonlocal last
        if not seconds or time.monotonic() - last < seconds:
            return False
        last = time.monotonic()
        return True

    return due


class ServerThread:
    """Server in a thread beside a worker. An error of it ends all ranks, as one of the engine's threads does."""

    def __init__(self, server: Server) -> None:
        self._thread = threading.Thread(target=server.run, name=f"{THREAD_PREFIX}server {server.number}")
        self._thread.start()

    def join(self) -> None:
        """Wait until the server has ended."""
        self._thread.join()
