"""Player of a worker of an asynchronous rule, or of its servers: steps, and the orders that come with servers' replies.

    step ─ replies ─▶ SAVE: keep this worker's state   CENTRE: test and save the centre   STOP
    at the end    ENDED ─▶ FETCH: the final centre, saved and tested   CLOSE, LEAVE: end

Steps, samples and random numbers follow from the seed, the worker and its step; learning rates from the replies. So the
weights follow from the order in which the servers have served the workers, and from nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unisono import witness
from unisono.asynchronous.decisions import Budget
from unisono.asynchronous.event_log import EventLog
from unisono.asynchronous.exchange import Centre, Coding, WorkerExchange
from unisono.asynchronous.link import MpiPort, process_failed, survives_deaths
from unisono.asynchronous.messages import Kind, Order, Reply, Request, WorkerHeader, decode_reply, reply_length
from unisono.asynchronous.server import Replay, Server
from unisono.data.loading import Batch
from unisono.errors import StallError
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.schedules.pieces import bounds
from unisono.step import program
from unisono.training import cut, run_directory
from unisono.training.accuracy import Accuracy, LossSum, accuracy_of
from unisono.training.checkpoint.files import copied, save
from unisono.training.checkpoint.layout import Checkpoint
from unisono.training.measures import result_rows
from unisono.training.player import CopyState, Draw, Event, EventPlayer, Save, TrainStep
from unisono.training.recipe import Recipe, rate_at
from unisono.training.run_directory import Process, own_process
from unisono.training.signals import STOPPED, SignalHandlers, Timer
from unisono.training.state import RunPoint, load_rank
from unisono.training.trainer import KINDS, seed_of_step
from unisono.uncaught import THREAD_PREFIX

if TYPE_CHECKING:
    from unisono.training.run import Run


class WorkerPlayer(EventPlayer):
    """Player on a rank of an asynchronous rule, which trains, serves, or does both. Made on all ranks together."""

    def __init__(self, run: Run, rule: BaseAsynchronousRule) -> None:
        super().__init__(run)
        links = run.trainer.reducer.links
        assert links is not None, "the reducer of an asynchronous rule has links"
        self.rule, self.links, self.worker = rule, links, run.world.rank
        self.counters, self.request = cut.WorkerCounters(), Request.NONE
        self._beginning = cut.begin_new(links.seats)
        self._made, self._dismissed = 0, False  # samples of the last step; True where this worker ends alone
        self._sent = WorkerHeader()
        self._replies: Sequence[Reply] = ()
        if run.options.machine is not None:
            name = run.recipe.rule.name
            run.notes.append(f"no prediction is sealed: rule {name} has no step that all ranks make together")

    def begin(self, before: Recipe | None) -> None:
        """Load the centre of a run that is resumed, whose recipe was `before`, or the log of a replayed one."""
        run, source = self.run, self.run.options.replay
        if before is not None:
            self._beginning = cut.begin_resumed(self.rule, run, before)
        elif source is not None:
            self._beginning = run.world.call_on_root(lambda: cut.begin_replay(self.links.seats, source))
        run.began -= self._beginning.seconds
        run.notes += [*self._beginning.notes, *cut.describe_seats(run, self.rule)]

    def train(self) -> int:
        run, trains = self.run, self.worker < self.links.seats.workers
        processes = run.world.all_gather_object(own_process())
        if run.world.rank == 0:
            for note in run.notes:
                run.display.log(note)
        server = self._make_server(processes)
        if trains:
            return leave(run, server, processes, self._train_and_serve(server))
        assert server is not None, "a rank that does not train serves"
        with SignalHandlers(self.ask, run.end_at_once, lambda _: None):  # no checkpoint is late here: workers write it
            server.run()
        if not server.living:
            run.display.log(f"no worker is left: the run ends; resume with: unisono train --resume {run.home}")
        return leave(run, server, processes, 1 if not server.living else STOPPED if server.stopped else 0)

    def _make_server(self, processes: Sequence[Process]) -> Server | None:
        """Return the server of this rank, if it has one. Its centre has the weights and buffers of the model."""
        run, rule, links, training = self.run, self.rule, self.links, self.run.recipe.training
        reducer, workers = run.trainer.reducer, links.seats.workers
        server = self.worker - (workers if rule.server == "rank" else 0)
        if not 0 <= server < links.seats.servers:
            return None
        layout = reducer.programs.layout()
        server_of = rule.server_of(layout)
        flats = {key: flat for key, flat in reducer.weights.flats().items() if server_of[key] == server}
        reducer.buffers.pack()
        codings = [  # of copies: made before the first exchange moves the centre
            Coding(rule.exchange.wire, False, {key: flat.clone() for key, flat in flats.items()})
            for _ in range(workers)
        ]
        buffers = reducer.buffers.flat.clone() if layout.buffers else None
        here = {worker: process.process for worker, process in enumerate(processes[:workers]) if process.is_here}
        recorded, trains = self._beginning.recorded, self.worker < workers
        return Server(
            rule,
            server,
            layout,
            Centre(flats, codings.__getitem__, buffers, reducer.buffers.move),
            MpiPort(links.comm, workers, links.timeout, here),
            self._beginning.states[server],
            Budget(run.feed.samples, training.epochs, training.checkpoint_every * training.batch),
            clock=lambda: run.elapsed,
            timeout=links.timeout,
            log=EventLog(run.home, server),
            replay=None if recorded is None else Replay(recorded[server]),
            due=Timer(60 * training.checkpoint_minutes).due,
            request=(lambda: Request.NONE) if trains else self._take_request,  # a worker's go with its headers
            observe=(lambda _: None) if run.timeline is None else run.timeline.add,
            report=run.display.log,
        )

    def _train_and_serve(self, server: Server | None) -> int:
        """Train, while the server of this rank serves beside it. Return the exit code."""
        run, reducer, snapshot = self.run, self.run.trainer.reducer, self._beginning.snapshot
        wire = self.rule.exchange.wire
        coding = Coding(wire, True, reducer.weights.flats() if wire else {})
        self.exchange = reducer.exchange = WorkerExchange(self.links.seats.workers, coding)
        if snapshot is None:  # the worker begins at the centre
            state = self._beginning.states[0]
            self.counters = cut.WorkerCounters(state.workers[self.worker].step, known=state.samples)
            reducer.programs.resume(self.counters.step)
        else:
            self.counters = cut.WorkerCounters(**snapshot.progress)
            self.losses = LossSum(self.counters.loss)
            load_rank(run.trainer, self.counters.step, snapshot.weights, snapshot.optimizer)
        thread = None
        if server is not None:  # an error in it ends all ranks, as one of the engine's threads does
            thread = threading.Thread(target=server.run, name=f"{THREAD_PREFIX}server {server.index}")
            thread.start()
        with SignalHandlers(self.ask, run.end_at_once, run.display.log) as self.signals:
            try:
                self.exchange.take, self._state = self._copy_state, run.trainer.model.state_dict()
                self.play(self._events())
                run.trainer.wait()
                code = self._end()
                if self._dismissed and thread is None and not survives_deaths():
                    threading.Event().wait()  # for the end of the run, which ends this rank, too
            except Exception as error:  # whatever it is: where others can go on, it ends this rank alone
                if not survives_deaths():
                    raise
                self._end_alone(error)
        if thread is not None:
            thread.join()
        return code

    def _end_alone(self, error: Exception) -> NoReturn:
        """End this rank after an error, where the others can go on without it. The last centre is saved if it was the
        server that died."""
        rank = self.run.world.rank
        if process_failed(error) or isinstance(error.__cause__, StallError):
            if self.links.first_living() == rank:
                self._save_last()
                self.run.display.log(
                    f"the server has died: the run ends. The last centre is saved; resume with: unisono train --resume "
                    f"{self.run.home}"
                )
                exit_at_once(rank, 1)
            exit_at_once(rank, 0)  # the rank that saves gives the code; another one would end it before it has
        traceback.print_exception(error)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)  # a launcher lets the others go on after a signal, not after an exit code
        raise error

    def ask(self, kind: str) -> None:
        """Request "save" or "stop" with the next exchange. Signal handlers may call this."""
        self.request = Request.STOP if kind == "stop" else max(self.request, Request.SAVE)

    def _take_request(self) -> Request:
        """Return what was requested since the last call."""
        taken, self.request = self.request, Request.NONE
        return taken

    @property
    def batch(self) -> int:
        """Samples of a step of this worker: its share of the recipe's batch."""
        first, last = bounds(self.run.recipe.training.batch, self.links.seats.workers, self.worker)
        return last - first

    def _events(self) -> Iterator[Event]:
        """Yield steps, and what the replies to their exchanges order, until a reply orders to stop."""
        now, orders, seed = self.counters, Order.NONE, self.run.recipe.training.seed
        yield Draw(0, now.step)
        while not orders & Order.STOP:
            header = self._header(Kind.EXCHANGE) if self.rule.exchanges(program.Step(now.step)) else None
            if header is not None:
                self.losses = LossSum()
            yield TrainStep(now.step, now.step, self._rate(), seed_of_step(seed, now.step, self.worker), header)
            if header is not None:
                reply = self._replies[0]
                known, orders = now.known, reply.orders
                if any(each.orders & Order.LEAVE for each in self._replies):
                    orders |= Order.STOP
                now.known, now.samples = reply.samples, 0
                if orders & Order.SAVE:
                    sent = cut.WorkerCounters(header.step, header.samples, header.loss, known)
                    yield CopyState(RunPoint(step=reply.cut), sent)
                if orders & Order.CENTRE:
                    yield Save(RunPoint(reply.epoch, step=reply.cut), tests=bool(reply.ended))
            now.step, now.samples = now.step + 1, now.samples + self._made

    def draw(self, event: Draw) -> Iterator[Batch]:
        return self.feed.own_batches(self.batch, event.done)

    def step(self, event: TrainStep) -> int:
        """Train on the next batch, and exchange with the servers where there is a header to announce it."""
        if event.exchange is not None:
            model = self.run.trainer.model
            self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name in self._state}
            owners = {name: name.rpartition(".")[0] for name in self._state if f".{name}".endswith("._extra_state")}
            self._extra = {name: copied(model.get_submodule(owner).get_extra_state()) for name, owner in owners.items()}
            self._sent = event.exchange
            self.exchange.prepare(event.exchange)
        self._made = super().step(event)
        if event.exchange is not None:
            with self.run.trainer.span("wait for replies", "waiting"):
                self.run.trainer.reducer.runner.wait_for_replies()
            self._replies = self.exchange.replies()
        return self._made

    def copy_state(self, event: CopyState) -> None:
        assert event.counters is not None and self.signals is not None, "a worker copies its own state"
        trainer = self.run.trainer
        trainer.wait()
        # taken by the updates' thread, before what came was applied: the wait is for that thread
        assert self.exchange.snapshot is not None, "it is taken when all servers have replied"
        state = Checkpoint(event.point.step, **self.exchange.snapshot, progress=asdict(event.counters))
        with trainer.span("write", "checkpoint"):
            save(cut.worker_folder(self.run.home, self.worker), state)
        self.signals.pending_since = None  # another worker may write the centre of that checkpoint
        self.request = Request.STOP if self.request is Request.STOP else Request.NONE  # of a signal that all have got

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights of the centre that came last."""
        return self.run.trainer.reducer.weights.centre(self.exchange.centre, self.exchange.centre_buffers)

    def checkpoint(self, event: Save) -> Checkpoint:
        weights = copied(self.run.trainer.model.state_dict())
        return cut.centre_checkpoint(event.point.step, weights, self._replies, self.run.feed.fingerprint)

    def report_saved(self, event: Save) -> None:
        if not event.tests:
            self.run.display.log(f"saved the centre after {event.point.step} steps of all workers")

    def end_epoch(self) -> dict[str, Any]:
        """Test the centre. Return the metrics of the epoch, as the first server knows it."""
        reply, sent = self._replies[0], self._sent
        samples = reply.loss_samples + sent.samples
        self.accuracy = self._test()
        return {
            "epoch": reply.ended,
            "step": reply.cut,
            "learning_rate": self._rate(),
            "loss": (reply.loss + sent.loss) / max(1, samples),
            **self.run.results(self.accuracy, samples, reply.epoch_seconds),
            "seconds": reply.epoch_seconds,
            "elapsed": reply.elapsed,
            **dict(zip(KINDS, reply.seconds, strict=True)),
        }

    def _rate(self) -> float:
        """Return the learning rate of the next step: that of the share of the run that all workers have made."""
        training = self.run.recipe.training
        ahead = (self.counters.samples + self.batch / 2) * self.links.seats.workers
        epoch = min((self.counters.known + ahead) / self.run.feed.samples, training.epochs * (1 - 1e-9))
        return rate_at(self.run.recipe.optimizer, epoch, training.epochs, self.batch)

    def _header(self, kind: Kind) -> WorkerHeader:
        now, seconds = self.counters, tuple(self.run.trainer.recorder.split().values())
        return WorkerHeader(kind, now.step, now.samples, self.losses.total, self._take_request(), seconds)

    def _copy_state(self) -> dict[str, Any]:
        """Return copies of this worker's weights and optimizer state, before what came is applied; buffers and extra
        states are as they were before the step. Called in the thread of the updates.

        The state_dict is that from the beginning, whose tensors are the model's own: to read it from the model would
        wait for the updates that follow.
        """
        optimizer = torch.optim.Optimizer.state_dict(self.run.trainer.optimizer)
        with self.run.trainer.reducer.programs.memory.incoming(marked=True):
            weights = copied(self._state)
            weights.update(self._buffers | self._extra)
            return {"weights": weights, "optimizer": copied(optimizer)}

    def _save_last(self) -> None:
        """Store the centre that came last: the server has died. The model itself would wait for what has failed."""
        if self.exchange.last is None:
            return
        replies, centre = self.exchange.last
        replies = [reply._replace(orders=Order.NONE) for reply in replies]  # no worker leaves a snapshot for it
        with self.run.trainer.reducer.weights.centre(centre, self.exchange.centre_buffers, wait=False):
            weights = copied(self._state)
        weights.update(self._extra)
        step = sum(worker.step for worker in replies[0].workers)
        checkpoint = cut.centre_checkpoint(step, weights, replies, self.run.feed.fingerprint)
        save(self.run.home / run_directory.CHECKPOINTS, checkpoint)

    def _test(self) -> Accuracy:
        run = self.run
        with run.trainer.span("evaluation", "evaluation"):
            source = self.feed.test_batches(run.recipe.training.batch, alone=True)
            counts = run.trainer.count_correct(run.awaited(source))
        run.trainer.recorder.discard()
        return accuracy_of(counts, run.feed.test_samples * run.feed.labels_per_sample)

    def _end(self) -> int:
        """Take leave of the servers; the worker that they choose stores the final centre. Return the exit code."""
        for link in self.links.links:  # all servers: a bound of staleness no longer waits for this worker
            link.announce(self._header(Kind.ENDED).encode())
        orders, code = self._receive_reply().orders, 0
        self._dismissed = bool(orders & Order.STOP)
        if orders & Order.FETCH:
            self._fetch()
        if orders & (Order.FETCH | Order.CLOSE):
            for link in self.links.links:
                link.announce(WorkerHeader(Kind.DONE).encode())
        if orders & Order.CLOSE and self.signals is not None and self.signals.stop:
            self.run.display.log(f"resume with: unisono train --resume {self.run.home}")
            code = STOPPED
        source = self.run.options.replay
        if orders & Order.FETCH and source is not None:
            different = cut.compare(self.run.home, source)
            verdict = f"are those of {source}, bit for bit"
            if different is not None:
                code, verdict = 1, f"differ from those of {source}: {different} is the first that does"
            self.run.display.log(f"the final weights {verdict}")
        return code

    def _receive_reply(self, server: int = 0) -> Reply:
        numbers = torch.empty(reply_length(self.links.seats.workers), dtype=torch.float64)
        self.links.links[server].receive(numbers)
        return decode_reply(numbers)

    def _fetch(self) -> None:
        """Store and evaluate the final centre."""
        run, header = self.run, self._header(Kind.FETCH)
        server_of = self.rule.server_of(run.trainer.reducer.programs.layout())
        replies = []
        for server, link in enumerate(self.links.links):
            link.announce(header.encode())
            replies.append(self._receive_reply(server))
            for key, its in server_of.items():
                if its == server:
                    link.receive(self.exchange.centre[key])
            if server == 0 and self.exchange.centre_buffers is not None:
                link.receive(self.exchange.centre_buffers)
        self._replies, self._sent = replies, header._replace(samples=0, loss=0.0)
        final = replies[0]
        self.play([Save(RunPoint(final.epoch, step=final.cut), tests=True)])
        assert self.accuracy is not None, "an epoch ends with the final centre"
        results = run.results(self.accuracy, final.samples, final.elapsed)
        rows = [*result_rows(results), ("steps of all workers", f"{final.cut}"), ("time", f"{final.elapsed:.2f} s")]
        run.display.end(rows, dict(zip(KINDS, final.seconds, strict=True)))
        run.report_last(results)


def leave(run: Run, server: Server | None, processes: Sequence[Process], code: int) -> int:
    """Return the exit code, or end this process where ranks have died and nothing can be done together."""
    gone = set[int]() if server is None else server.gone
    if survives_deaths():
        for process in (processes[worker] for worker in gone):
            if process.is_here and process.born and process.may_live:  # stopped: the launcher would wait for it
                with suppress(ProcessLookupError):
                    os.kill(process.process, signal.SIGKILL)
        if run.timeline is not None:
            run.display.log("no timeline is written: under mpirun --with-ft ulfm each rank ends by itself")
        exit_at_once(run.world.rank, code)
    if gone:
        names = ", ".join(map(str, sorted(gone)))
        run.world.abort(code, f"unisono: the run is over; worker {names}, which has stopped, is ended with it\n")
    run.trainer.reducer.release()
    run.feed.close()
    return code


def exit_at_once(rank: int, code: int) -> NoReturn:
    """End this process without MPI_Finalize, which may wait for a rank that has died."""
    witness.notify(rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
