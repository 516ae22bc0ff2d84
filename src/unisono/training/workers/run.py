"""Runs a recipe with an asynchronous rule: workers, servers, a resumed run, a replay.

all ranks together    feed ─ network ─ trainer ─ the centre and the snapshots to resume from
from then on          each worker and each server by itself, until the servers end the run
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from unisono import witness
from unisono.asynchronous.exchange import WorkerExchange
from unisono.asynchronous.messages import Request
from unisono.asynchronous.port import process_failed, survives_deaths
from unisono.asynchronous.server import Server
from unisono.binding import CoreShare
from unisono.data.feed import Feed, FeedFacts
from unisono.engine import Observe
from unisono.errors import StallError
from unisono.mpi import MPI
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.training.build import make_feed
from unisono.training.progress import ProgressDisplay
from unisono.training.recipe import Recipe
from unisono.training.resume import ResumePoint, check_change
from unisono.training.signals import STOPPED, SignalHandlers
from unisono.training.timeline import Timeline
from unisono.training.trainer import Trainer
from unisono.training.workers.begin import Beginning, begin_new, begin_replay, begin_resumed, compare
from unisono.training.workers.serve import ServerThread, Serving, make_coding, make_server
from unisono.training.workers.snapshots import WorkerSnapshot
from unisono.training.workers.worker import Worker
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


@dataclass
class AsynchronousRun:
    """A run by workers and servers, made on all ranks together."""

    recipe: Recipe
    rule: BaseAsynchronousRule
    world: World
    feed: FeedFacts
    trainer: Trainer
    home: Path
    began: float
    """Start of the run on `time.perf_counter`."""
    notes: Sequence[str] = ()
    """Lines to report at the start."""
    timeline: Timeline | None = None
    replays: Path | None = None
    """Run that is replayed."""

    def __post_init__(self) -> None:
        self._seats = self.rule.seats(self.world.size)
        self._display = ProgressDisplay(True, self.recipe.training.epochs, live=False)
        self._asked: list[Request] = []
        self._survives = survives_deaths()

    def run(self, before: Recipe | None) -> int:
        """Train as worker or serve, or both; `before` is the recipe of the run that is resumed. Return the exit code.

        Called by all ranks together.
        """
        beginning, snapshot = self._begin(before)
        self._processes = self.world.all_gather_object((socket.gethostname(), os.getpid()))
        if self.world.rank == 0:
            for note in [*self.notes, *beginning.notes, *self._describe()]:
                self._display.log(note)
        server = self._server(beginning)
        if self.world.rank >= self._seats.workers:
            assert server is not None, "a rank that does not train serves"
            code = self._serve(server)
        else:
            code = self._train(server, beginning, snapshot)
        return self._leave(server, code)

    def _begin(self, before: Recipe | None) -> tuple[Beginning, WorkerSnapshot | None]:
        if before is not None:
            check_change(before, self.recipe, ResumePoint(step=1), self.feed.fingerprint)
            return begin_resumed(self.rule, self.world, self.trainer, self.home, self.feed.fingerprint)
        source = self.replays
        if source is not None:
            return self.world.call_on_root(lambda: begin_replay(self._seats, source)), None
        return begin_new(self._seats), None

    def _describe(self) -> list[str]:
        """Return lines on the seats, and on what the death of a rank means here."""
        workers, servers = self._seats
        place = "rank of its own" if self.rule.server == "rank" else "thread beside a worker"
        lines = [f"{workers} workers, {servers} server{'s' * (servers > 1)}, each a {place}; nobody waits for others"]
        if self._survives:
            lines.append("a worker that dies does not end the others")
        elif self.world.size > 1:
            lines.append(
                f"{MPI.get_vendor()[0]} as started here ends all ranks when one dies; with Open MPI's "
                "mpirun --with-ft ulfm the others go on"
            )
        return lines

    def _server(self, beginning: Beginning) -> Server | None:
        """Return the server of this rank, if it has one. Its centre is the model's weights."""
        number = self.world.rank - (self._seats.workers if self.rule.server == "rank" else 0)
        if not 0 <= number < self._seats.servers:
            return None
        recorded = None if beginning.recorded is None else beginning.recorded[number]
        here = socket.gethostname()
        processes = {
            rank: process for rank, (host, process) in enumerate(self._processes[: self._seats.workers]) if host == here
        }
        serving = Serving(
            *(self.rule, number, beginning.states[number], self.home, self.began - beginning.seconds),
            *(recorded, processes),
        )
        return make_server(
            *(serving, self.recipe, self.feed.samples, self.trainer.reducer, self.timeline, self._display.log),
            lambda: self._asked.pop() if self._asked else Request.NONE,
        )

    def _serve(self, server: Server) -> int:
        def ask(kind: str) -> None:
            self._asked.append(Request.STOP if kind == "stop" else Request.SAVE)

        with SignalHandlers(ask, self._end_at_once, self._display.log):
            server.run()
        if not server.living:
            self._display.log(f"no worker is left: the run ends; resume with: unisono train --resume {self.home}")
            return 1
        return STOPPED if server.stopped else 0

    def _train(self, server: Server | None, beginning: Beginning, snapshot: WorkerSnapshot | None) -> int:
        reducer, links = self.trainer.reducer, self.trainer.reducer.links
        assert links is not None, "the reducer of an asynchronous rule has links"
        feed = self.feed
        assert isinstance(feed, Feed), "a rank that trains has batches"
        coding = make_coding(self.rule, True, reducer.weights.flats() if self.rule.exchange.wire else {})
        exchange = reducer.exchange = WorkerExchange(self._seats.workers, coding)
        worker = Worker(
            *(self.recipe, self.rule, self.world.rank, links, exchange, feed, self.trainer, self.home),
            self._display,
        )
        if snapshot is None:
            worker.begin_at(beginning.states[0])
        else:
            worker.resume(snapshot)
        thread = None if server is None else ServerThread(server)
        with SignalHandlers(worker.ask, self._end_at_once, self._display.log) as worker.signals:
            try:
                code = worker.run()
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
        different = compare(self.home, source)
        if different is None:
            self._display.log(f"the final weights are those of {source}, bit for bit")
            return 0
        self._display.log(f"the final weights differ from those of {source}: {different} is the first that does")
        return 1

    def _end_alone(self, worker: Worker, error: Exception) -> NoReturn:
        """End this rank after an error, where the others can go on without it. The last centre is saved if it was the
        server that died."""
        if process_failed(error) or isinstance(error.__cause__, StallError):
            assert self.trainer.reducer.links is not None
            if self.trainer.reducer.links.first_living() == self.world.rank:
                worker.save_last()
                self._display.log(
                    f"the server has died: the run ends. The last centre is saved; resume with: unisono train --resume "
                    f"{self.home}"
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
            if self.timeline is not None:
                self._display.log("no timeline is written: under mpirun --with-ft ulfm each rank ends by itself")
            self._exit(code)
        if server is not None and server.gone:
            names = ", ".join(map(str, sorted(server.gone)))
            self.world.abort(code, f"unisono: the run is over; worker {names}, which has stopped, is ended with it\n")
        self.trainer.reducer.release()
        self.feed.close()
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
        witness.notify(self.world.rank)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _end_at_once(self) -> None:
        words = f"unisono: rank {self.world.rank}: a second SIGTERM: ended at once\n"
        self.world.abort(STOPPED, words)
