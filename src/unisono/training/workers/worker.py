"""Player of a worker of an asynchronous rule: steps, and the orders that come with a server's replies.

    step ─ replies ─▶ SAVE: keep this worker's state   CENTRE: test and save the centre   STOP
    at the end    ENDED ─▶ FETCH: the final centre, saved and tested   CLOSE, LEAVE: end

Steps, samples and random numbers follow from the seed, the worker and its step; learning rates from the replies. So the
weights follow from the order in which the servers have served the workers, and from nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from unisono.asynchronous.exchange import WorkerExchange
from unisono.asynchronous.link import ServerLinks
from unisono.asynchronous.messages import Kind, Order, Reply, Request, WorkerHeader, decode_reply, reply_length
from unisono.asynchronous.serving import RunState
from unisono.data.loading import Batch
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.schedules.pieces import bounds
from unisono.step import program
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy, accuracy_of
from unisono.training.checkpoint.layout import Checkpoint
from unisono.training.events import Draw, Event, RunPoint, Save, Snapshot, TrainStep, seed_of_step
from unisono.training.learning_rate import rate_at
from unisono.training.player import EventPlayer, Run
from unisono.training.recorder import KINDS
from unisono.training.signals import STOPPED
from unisono.training.state import load_optimizer
from unisono.training.workers.state import WorkerCounters, buffers_of, save_centre, save_worker, take


class WorkerPlayer(EventPlayer):
    """Player of the rest of a worker's run."""

    def __init__(self, run: Run, rule: BaseAsynchronousRule, links: ServerLinks, exchange: WorkerExchange) -> None:
        super().__init__(run)
        self.rule, self.links, self.exchange = rule, links, exchange
        self.number = run.world.rank
        self.counters = WorkerCounters()
        self.request = Request.NONE
        self.fetched = False
        """True once this worker has stored the final centre."""
        self._made: tuple[float, int] = 0.0, 0  # loss and samples of the last step
        self._sent = WorkerHeader()
        self._replies: Sequence[Reply] = ()
        self._accuracy: Accuracy | None = None  # of the centre that was stored last

    def resume(self, snapshot: Checkpoint) -> None:
        """Continue from a snapshot."""
        self.run.trainer.model.load_state_dict(snapshot.weights)
        load_optimizer(self.run.trainer.optimizer, snapshot.optimizer)
        self.counters = WorkerCounters(**snapshot.progress)
        self.run.trainer.reducer.programs.resume(self.counters.step)

    def begin_at(self, state: RunState) -> None:
        """Begin at the centre, with the number of steps and the samples of all workers that a server knows."""
        self.counters = WorkerCounters(state.workers[self.number].step, known=state.samples)
        self.run.trainer.reducer.programs.resume(self.counters.step)

    def train(self) -> int:
        """Train until the servers order to stop, then end the run with them. Return the exit code."""
        self.exchange.take, self._state = self._take, dict(self.run.trainer.model.state_dict())
        self.play(self._events())
        self.run.trainer.wait()
        return self._end()

    def ask(self, kind: str) -> None:
        """Request "save" or "stop" with the next exchange. Signal handlers may call this."""
        self.request = Request.STOP if kind == "stop" else max(self.request, Request.SAVE)

    @property
    def batch(self) -> int:
        """Samples of a step of this worker: its share of the recipe's batch."""
        first, last = bounds(self.run.recipe.training.batch, self.links.seats.workers, self.number)
        return last - first

    def _events(self) -> Iterator[Event]:
        """Yield steps, and what the replies to their exchanges order, until one orders to stop."""
        now, orders, seed = self.counters, Order.NONE, self.run.recipe.training.seed
        yield Draw(0, now.step)
        while not orders & Order.STOP:
            header = self._header(Kind.EXCHANGE) if self.rule.exchanges(program.Step(now.step)) else None
            yield TrainStep(now.step, now.step, self._rate(), seed_of_step(seed, now.step, self.number), header)
            if header is not None:
                reply = self._replies[0]
                known, orders = now.known, reply.orders
                now.known, now.samples, now.loss = reply.samples, 0, 0.0
                if orders & Order.SAVE:
                    yield Snapshot(reply.cut, header, known)
                if orders & Order.CENTRE:
                    yield Save(RunPoint(reply.epoch, step=reply.cut), tests=bool(reply.ended))
                if header.request is Request.SAVE or orders & Order.STOP:
                    self.request = Request.NONE
            loss, samples = self._made
            now.step, now.samples, now.loss = now.step + 1, now.samples + samples, now.loss + loss

    def draw(self, event: Draw) -> Iterator[Batch]:
        """Return batches of this worker's own."""
        return self.feed.own_batches(self.batch, event.done)

    def step(self, event: TrainStep) -> tuple[float, int]:
        """Train on the next batch, and exchange with the servers where there is a header to announce it."""
        if event.exchange is not None:
            self._buffers, self._sent = buffers_of(self.run.trainer.model), event.exchange
            self.exchange.prepare(event.exchange)
        self._made = super().step(event)
        if event.exchange is not None:
            with self.run.trainer.span("wait for replies", "waiting"):
                self.run.trainer.reducer.runner.wait_for_replies()
            self._replies = self.exchange.replies()
        return self._made

    def save_own(self, event: Snapshot) -> None:
        """Write this worker's state as it was when it sent the header."""
        trainer, header = self.run.trainer, event.header
        trainer.wait()
        assert self.exchange.snapshot is not None, "it is taken when all servers have replied"
        counters = WorkerCounters(header.step, header.samples, header.loss, event.known)
        with trainer.span("write", "checkpoint"):
            save_worker(self.run.home, self.number, event.cut, self.exchange.snapshot, counters)

    def save(self, event: Save) -> None:
        """Store the centre that has come with the servers' replies, tested where an epoch has ended."""
        run, cut = self.run, event.point.step
        run.trainer.wait()
        with run.trainer.reducer.weights.centre(self.exchange.centre, self.exchange.centre_buffers):
            with run.trainer.span("gather", "checkpoint"):
                weights = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}
            accuracy = self._test() if event.tests else None
        if accuracy is not None:
            metrics = self._metrics(self._replies[0], self._sent, accuracy)
            run_directory.add_metrics(run.home, metrics)
            run.display.epoch(metrics)
        else:
            run.display.log(f"saved the centre after {cut} steps of all workers")
        self._accuracy = accuracy
        with run.trainer.span("write", "checkpoint"):
            save_centre(run.home, cut, weights, self._replies, run.feed.fingerprint)

    def _rate(self) -> float:
        """Return the learning rate of the next step: that of the share of the run that all workers have made."""
        training = self.run.recipe.training
        ahead = (self.counters.samples + self.batch / 2) * self.links.seats.workers
        epoch = min((self.counters.known + ahead) / self.run.feed.samples, training.epochs * (1 - 1e-9))
        return rate_at(self.run.recipe.optimizer, epoch, training.epochs, self.batch)

    def _header(self, kind: Kind) -> WorkerHeader:
        now, seconds = self.counters, self.run.trainer.recorder.split()
        return WorkerHeader(kind, now.step, now.samples, now.loss, self.request, tuple(seconds[one] for one in KINDS))

    def _take(self) -> dict[str, Any]:
        """Return a copy of this worker's state, before what came is applied. Called in the thread of the updates."""
        return take(self._state, self.run.trainer.optimizer, self._buffers)

    def save_last(self) -> None:
        """Store the centre that came last: the server has died. The model itself would wait for what has failed."""
        last = self.exchange.last
        if last is None:
            return
        replies = [one._replace(orders=Order.NONE) for one in last.replies]  # no worker leaves a snapshot for it
        with self.run.trainer.reducer.weights.centre(last.centre, self.exchange.centre_buffers, wait=False):
            weights = {name: value.clone() for name, value in self._state.items()}
        cut = sum(one.step for one in replies[0].workers)
        save_centre(self.run.home, cut, weights, replies, self.run.feed.fingerprint)

    def _test(self) -> Accuracy:
        """Return the accuracy of the model on the whole test set."""
        run = self.run
        with run.trainer.span("evaluation", "evaluation"):
            source = self.feed.all_test_batches(run.recipe.training.batch)
            counts = run.trainer.count_correct(run.awaited(source))
        run.trainer.recorder.discard()
        return accuracy_of(counts, run.feed.test_samples * run.feed.labels_per_sample)

    def _metrics(self, reply: Reply, header: WorkerHeader, accuracy: Accuracy) -> dict[str, Any]:
        samples = reply.loss_samples + header.samples
        return {
            "epoch": reply.ended,
            "step": reply.cut,
            "learning_rate": self._rate(),
            "loss": (reply.loss + header.loss) / max(1, samples),
            **self.run.results(accuracy, samples, reply.epoch_seconds),
            "seconds": reply.epoch_seconds,
            "elapsed": reply.elapsed,
            **dict(zip(KINDS, reply.seconds, strict=True)),
        }

    def _end(self) -> int:
        """Take leave of the servers; the worker that they choose stores the final centre. Return the exit code."""
        for link in self.links.links:  # all servers: a bound of staleness no longer waits for this worker
            link.announce(self._header(Kind.ENDED).encode())
        orders = self._receive_reply().orders
        if orders & Order.FETCH:
            self._fetch()
            self.fetched = True
        if orders & (Order.FETCH | Order.CLOSE):
            for link in self.links.links:
                link.announce(WorkerHeader(Kind.DONE).encode())
        stopped = orders & Order.CLOSE and self.signals is not None and self.signals.stop
        if stopped:
            self.run.display.log(f"resume with: unisono train --resume {self.run.home}")
        return STOPPED if stopped else 0

    def _receive_reply(self, server: int = 0) -> Reply:
        numbers = torch.empty(reply_length(self.links.seats.workers), dtype=torch.float64)
        self.links.links[server].receive(numbers)
        return decode_reply(numbers)

    def _fetch(self) -> None:
        """Store and evaluate the final centre."""
        began = time.perf_counter()
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
        assert self._accuracy is not None, "an epoch ends with the final centre"
        results = run.results(self._accuracy, final.samples, final.elapsed)
        rows = [("steps of all workers", f"{final.cut}"), ("time", f"{final.elapsed:.2f} s")]
        run.report(results, rows, dict(zip(KINDS, final.seconds, strict=True)))
        run.report_last(results)
        run.trainer.recorder.add("waiting", time.perf_counter() - began)
