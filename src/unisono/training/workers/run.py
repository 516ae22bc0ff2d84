"""Runs a recipe with an asynchronous rule: workers, servers, a resumed run, a replay.

all ranks together    feed ─ network ─ trainer ─ the centre and the snapshots to resume from
from then on          each worker and each server by itself, until the servers end the run
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from unisono import witness
from unisono.asynchronous.event_log import EventLog
from unisono.asynchronous.exchange import Centre, Coding, WorkerExchange
from unisono.asynchronous.link import MpiPort, process_failed, survives_deaths
from unisono.asynchronous.messages import Request
from unisono.asynchronous.server import Server
from unisono.asynchronous.serving import Budget
from unisono.binding import CoreShare
from unisono.data.feed import FeedFacts
from unisono.engine import Observe
from unisono.errors import StallError
from unisono.mpi import MPI
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.training.build import make_feed
from unisono.training.events import RunPoint
from unisono.training.player import Run
from unisono.training.recipe import Recipe
from unisono.training.signals import STOPPED, SignalHandlers
from unisono.training.state import check_change
from unisono.training.workers.state import begin_new, begin_replay, begin_resumed, compare
from unisono.training.workers.worker import WorkerPlayer
from unisono.uncaught import THREAD_PREFIX
from unisono.world import World


def make_worker_feed(
    recipe: Recipe, rule: BaseAsynchronousRule, world: World, share: CoreShare, observe: Observe | None = None
) -> FeedFacts:
    """Return the feed of a worker, or the facts of one for a rank that only serves. Called by all ranks together.

    `observe` is called with the spans of the feed's work.
    """
    trains = world.rank < rule.seats(world.size).workers
    group = world.split(0 if trains else 1)
    feed = make_feed(recipe, group, share, out_of_step=True, observe=observe) if trains else None
    facts = world.call_on_root(lambda: None if feed is None else feed.facts)
    assert facts is not None, "rank 0 is a worker"
    return facts if feed is None else feed


class AsynchronousRun:
    """A run by workers and servers, made on all ranks together."""

    def __init__(
        self, run: Run, rule: BaseAsynchronousRule, replays: Path | None = None, machine: str | None = None
    ) -> None:
        """Make the run; `replays` is the folder of the run that is replayed. A `machine` predicts nothing here."""
        self.run, self.rule, self.replays = run, rule, replays
        self._seats = rule.seats(run.world.size)
        links = run.trainer.reducer.links
        assert links is not None, "the reducer of an asynchronous rule has links"
        self._links = links
        self._asked: list[Request] = []
        self._survives = survives_deaths()
        self._beginning = begin_new(self._seats)
        if machine is not None:
            name = run.recipe.rule.name
            run.notes.append(f"no prediction is sealed: rule {name} has no step that all ranks make together")

    def begin(self, before: Recipe | None) -> None:
        """Load the centre of a run that is resumed, whose recipe was `before`, or the log of one that is replayed.

        Called by all ranks together.
        """
        run, source = self.run, self.replays
        if before is not None:
            check_change(before, run.recipe, RunPoint(step=1), run.feed.fingerprint)
            self._beginning = begin_resumed(self.rule, run)
        elif source is not None:
            self._beginning = run.world.call_on_root(lambda: begin_replay(self._seats, source))
        run.began -= self._beginning.seconds
        run.notes += [*self._beginning.notes, *self._describe()]

    def train(self) -> int:
        """Train as worker or serve, or both. Return the exit code. Called by all ranks together."""
        run = self.run
        self._processes = run.world.all_gather_object((socket.gethostname(), os.getpid()))
        if run.world.rank == 0:
            for note in run.notes:
                run.display.log(note)
        number = run.world.rank - (self._seats.workers if self.rule.server == "rank" else 0)
        server = self._make_server(number) if 0 <= number < self._seats.servers else None
        if run.world.rank >= self._seats.workers:
            assert server is not None, "a rank that does not train serves"
            code = self._serve(server)
        else:
            code = self._train(server)
        return self._leave(server, code)

    def _describe(self) -> list[str]:
        """Return lines on the seats, and on what the death of a rank means here."""
        workers, servers = self._seats
        place = "rank of its own" if self.rule.server == "rank" else "thread beside a worker"
        lines = [f"{workers} workers, {servers} server{'s' * (servers > 1)}, each a {place}; nobody waits for others"]
        if self._survives:
            lines.append("a worker that dies does not end the others")
        elif self.run.world.size > 1:
            lines.append(
                f"{MPI.get_vendor()[0]} as started here ends all ranks when one dies; with Open MPI's "
                "mpirun --with-ft ulfm the others go on"
            )
        return lines

    def _make_server(self, number: int) -> Server:
        """Return the server of this rank. Its centre has the weights and buffers of the model."""
        run, rule, links, state = self.run, self.rule, self._links, self._beginning
        reducer, training = run.trainer.reducer, run.recipe.training
        layout, server_of = reducer.programs.layout(), rule.server_of(reducer.programs.layout())
        mine = {key: flat for key, flat in reducer.weights.flats().items() if server_of[key] == number}
        reducer.buffers.pack()
        codings = [  # of copies: made before the first exchange moves the centre
            Coding(rule.exchange.wire, False, {key: one.clone() for key, one in mine.items()})
            for _ in range(links.seats.workers)
        ]
        buffers = reducer.buffers.flat.clone() if layout.buffers else None
        hosts = enumerate(self._processes[: self._seats.workers])
        here = {rank: process for rank, (host, process) in hosts if host == socket.gethostname()}
        return Server(
            rule,
            number,
            layout,
            Centre(mine, codings.__getitem__, buffers, reducer.buffers.move),
            MpiPort(links.comm, links.seats.workers, links.timeout, here),
            state.states[number],
            Budget(run.feed.samples, training.epochs, training.checkpoint_every * training.batch),
            rule.staleness or None,
            clock=lambda: run.elapsed,
            timeout=links.timeout,
            log=EventLog(run.home, number),
            recorded=None if state.recorded is None else state.recorded[number],
            due=_timer(60 * training.checkpoint_minutes),
            request=lambda: self._asked.pop() if self._asked else Request.NONE,
            observe=(lambda _: None) if run.timeline is None else run.timeline.add,
            report=run.display.log,
        )

    def _serve(self, server: Server) -> int:
        def ask(kind: str) -> None:
            self._asked.append(Request.STOP if kind == "stop" else Request.SAVE)

        with SignalHandlers(ask, self.run.end_at_once, self.run.display.log):
            server.run()
        if not server.living:
            self.run.display.log(
                f"no worker is left: the run ends; resume with: unisono train --resume {self.run.home}"
            )
            return 1
        return STOPPED if server.stopped else 0

    def _train(self, server: Server | None) -> int:
        run, reducer, beginning = self.run, self.run.trainer.reducer, self._beginning
        wire = self.rule.exchange.wire
        coding = Coding(wire, True, reducer.weights.flats() if wire else {})
        exchange = reducer.exchange = WorkerExchange(self._seats.workers, coding)
        worker = WorkerPlayer(run, self.rule, self._links, exchange)
        if beginning.snapshot is None:
            worker.begin_at(beginning.states[0])
        else:
            worker.resume(beginning.snapshot)
        thread = None
        if server is not None:  # an error in it ends all ranks, as one of the engine's threads does
            thread = threading.Thread(target=server.run, name=f"{THREAD_PREFIX}server {server.number}")
            thread.start()
        with SignalHandlers(worker.ask, run.end_at_once, run.display.log) as worker.signals:
            try:
                code = worker.train()
            except Exception as error:  # whatever it is: where others can go on, it ends this rank alone
                if not self._survives:
                    raise
                self._end_alone(worker, error)
        if thread is not None:
            thread.join()
        if worker.fetched and self.replays is not None:
            code = self._compare(self.replays)
        return code

    def _compare(self, source: Path) -> int:
        """Report whether a replay has found the weights of its run. Return the exit code."""
        different = compare(self.run.home, source)
        if different is None:
            self.run.display.log(f"the final weights are those of {source}, bit for bit")
            return 0
        self.run.display.log(f"the final weights differ from those of {source}: {different} is the first that does")
        return 1

    def _end_alone(self, worker: WorkerPlayer, error: Exception) -> NoReturn:
        """End this rank after an error, where the others can go on without it. The last centre is saved if it was the
        server that died."""
        if process_failed(error) or isinstance(error.__cause__, StallError):
            if self._links.first_living() == self.run.world.rank:
                worker.save_last()
                self.run.display.log(
                    f"the server has died: the run ends. The last centre is saved; resume with: unisono train --resume "
                    f"{self.run.home}"
                )
                self._exit(1)
            self._exit(0)  # the rank that saves gives the code; another one would end it before it has
        traceback.print_exception(error)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)  # a launcher lets the others go on after a signal, not after an exit code
        raise error

    def _leave(self, server: Server | None, code: int) -> int:
        """Return the exit code, or end this process where ranks have died and nothing can be done together."""
        if self._survives:
            if server is not None:
                self._kill_stopped(server)
            if self.run.timeline is not None:
                self.run.display.log("no timeline is written: under mpirun --with-ft ulfm each rank ends by itself")
            self._exit(code)
        if server is not None and server.gone:
            names = ", ".join(map(str, sorted(server.gone)))
            self.run.world.abort(
                code, f"unisono: the run is over; worker {names}, which has stopped, is ended with it\n"
            )
        self.run.trainer.reducer.release()
        self.run.feed.close()
        return code

    def _kill_stopped(self, server: Server) -> None:
        """End workers of this host that are stopped: the launcher would wait for them."""
        for worker in server.gone:
            host, process = self._processes[worker]
            if host == socket.gethostname():
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def _exit(self, code: int) -> NoReturn:
        """End this process without MPI_Finalize, which may wait for a rank that has died."""
        witness.notify(self.run.world.rank)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
