"""Loop of a worker of an asynchronous rule: steps, and the orders that come with a server's replies.

    prepare ─ step ─ replies ─▶ SAVE: this worker's state   CENTRE: store and evaluate the centre   STOP
    at the end    ENDED ─▶ FETCH: the final centre, stored and evaluated   CLOSE, LEAVE: end

Steps, samples and random numbers follow from the seed, the worker and its step; learning rates from the replies. So the
weights follow from the order in which the servers have served the workers, and from nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.asynchronous.exchange import WorkerExchange
from unisono.asynchronous.messages import Kind, Order, Reply, Request, WorkerHeader, decode_reply, reply_length
from unisono.asynchronous.serving import RunState
from unisono.data.feed import Feed
from unisono.reducer.family_passes import ServerLinks
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.schedules.pieces import bounds
from unisono.step.program import Step
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy, accuracy_of
from unisono.training.build import DTYPES
from unisono.training.learning_rate import rate_at
from unisono.training.progress import ProgressDisplay
from unisono.training.rank_states import load_optimizer
from unisono.training.recipe import Recipe
from unisono.training.recorder import KINDS
from unisono.training.results import last_line, result_metrics, result_rows
from unisono.training.seeds import seed_of_step
from unisono.training.signals import STOPPED, SignalHandlers
from unisono.training.trainer import Trainer
from unisono.training.workers.snapshots import WorkerSnapshot, buffers_of, save_centre, save_worker, take


@dataclass
class Worker:
    """The rest of a worker's run."""

    recipe: Recipe
    rule: BaseAsynchronousRule
    number: int
    links: ServerLinks
    exchange: WorkerExchange
    feed: Feed
    trainer: Trainer
    home: Path
    display: ProgressDisplay
    steps: int = 0
    """Number of steps made."""
    samples: int = 0
    """Samples since the last header."""
    loss: float = 0.0
    """Sum of the loss over them."""
    known: int = 0
    """Samples of all workers, as the last reply had them."""
    request: Request = Request.NONE
    signals: SignalHandlers | None = None
    fetched: bool = False
    """True once this worker has stored the final centre."""
    _stop: bool = field(default=False)

    def resume(self, snapshot: WorkerSnapshot) -> None:
        """Continue from a snapshot."""
        self.trainer.model.load_state_dict(snapshot.weights)
        load_optimizer(self.trainer.optimizer, snapshot.optimizer)
        self.steps, self.samples, self.loss, self.known = (
            snapshot.step,
            snapshot.samples,
            snapshot.loss,
            snapshot.known,
        )
        self.trainer.reducer.programs.resume(snapshot.step)

    def begin_at(self, state: RunState) -> None:
        """Begin at the centre, with the number of steps and the samples of all workers that a server knows."""
        self.steps, self.known = state.workers[self.number].step, state.samples
        self.trainer.reducer.programs.resume(self.steps)

    def run(self) -> int:
        """Train until the servers order to stop, then end the run with them. Return the exit code."""
        self.exchange.take, self._state = self._take, dict(self.trainer.model.state_dict())
        source = self.feed.own_batches(self.batch, self.steps)
        batches = self.trainer.awaited(source, DTYPES[self.recipe.model.dtype])
        while not self._stop:
            inputs, labels = next(batches)
            self._step(inputs, labels)
        self.trainer.wait()
        return self._end()

    def ask(self, kind: str) -> None:
        """Request "save" or "stop" with the next exchange. Signal handlers may call this."""
        self.request = Request.STOP if kind == "stop" else max(self.request, Request.SAVE)

    @property
    def batch(self) -> int:
        """Samples of a step of this worker: its share of the recipe's batch."""
        first, last = bounds(self.recipe.training.batch, self.links.seats.workers, self.number)
        return last - first

    def _step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        training = self.recipe.training
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self._rate()
        torch.manual_seed(seed_of_step(training.seed, self.steps, self.number))
        exchanges = self.rule.exchanges(Step(self.steps))
        header = self._header(Kind.EXCHANGE)
        if exchanges:
            self._buffers = buffers_of(self.trainer.model)
            self.exchange.prepare(header)
        loss = self.trainer.step(inputs, labels)
        if exchanges:
            with self.trainer.span("wait for replies", "waiting"):
                self.trainer.reducer.runner.wait_for_replies()
            self.samples, self.loss = 0, 0.0
            self._obey(self.exchange.reply, header)
        self.steps += 1
        self.samples += len(labels)
        self.loss += loss

    def _rate(self) -> float:
        """Return the learning rate of the next step: that of the share of the run that all workers have made."""
        training = self.recipe.training
        ahead = (self.samples + self.batch / 2) * self.links.seats.workers
        epoch = min((self.known + ahead) / self.feed.samples, training.epochs * (1 - 1e-9))
        return rate_at(self.recipe.optimizer, epoch, training.epochs, self.batch)

    def _header(self, kind: Kind) -> WorkerHeader:
        seconds = tuple(self.trainer.recorder.split()[name] for name in KINDS)
        return WorkerHeader(kind, self.steps, self.samples, self.loss, self.request, seconds)

    def _take(self) -> dict[str, Any]:
        """Return a copy of this worker's state, before what came is applied. Called in the thread of the updates."""
        return take(self._state, self.trainer.optimizer, self._buffers)

    def _obey(self, reply: Reply, header: WorkerHeader) -> None:
        """Carry out the orders of a reply to the exchange that `header` announced."""
        before, self.known = self.known, reply.samples
        if reply.orders & Order.SAVE:
            self.trainer.wait()
            assert self.exchange.snapshot is not None, "it is taken when all servers have replied"
            with self.trainer.span("write", "checkpoint"):
                save_worker(self.home, self.number, reply.cut, self.exchange.snapshot, header, before)
        if reply.orders & Order.CENTRE:
            self.trainer.wait()
            self._store(self.exchange.replies(), header)
        if header.request is Request.SAVE or reply.orders & Order.STOP:
            self.request = Request.NONE
        self._stop = bool(reply.orders & Order.STOP)

    def _store(self, replies: Sequence[Reply], header: WorkerHeader) -> Accuracy | None:
        """Store the centre that has come with the servers' replies. Return its accuracy where an epoch has ended."""
        reply, centre, buffers = replies[0], self.exchange.centre, self.exchange.centre_buffers
        with self.trainer.reducer.weights.centre(centre, buffers):
            with self.trainer.span("gather", "checkpoint"):
                weights = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
            accuracy = self._evaluate() if reply.ended else None
        if accuracy is not None:
            metrics = self._metrics(reply, header, accuracy)
            run_directory.add_metrics(self.home, metrics)
            self.display.epoch(metrics)
        else:
            self.display.log(f"saved the centre after {reply.cut} steps of all workers")
        with self.trainer.span("write", "checkpoint"):
            save_centre(self.home, reply.cut, weights, replies, self.feed.fingerprint)
        if self.signals is not None:
            self.signals.clear_pending()
        return accuracy

    def save_last(self) -> None:
        """Store the centre that came last: the server has died. The model itself would wait for what has failed."""
        last = self.exchange.last
        if last is None:
            return
        replies = [one._replace(orders=Order.NONE) for one in last.replies]  # no worker leaves a snapshot for it
        with self.trainer.reducer.weights.centre(last.centre, self.exchange.centre_buffers, wait=False):
            weights = {name: value.clone() for name, value in self._state.items()}
        save_centre(self.home, sum(one.step for one in replies[0].workers), weights, replies, self.feed.fingerprint)

    def _evaluate(self) -> Accuracy:
        """Return the accuracy of the model on the whole test set."""
        source = self.feed.all_test_batches(self.recipe.training.batch)
        with self.trainer.span("evaluation", "evaluation"):
            counts = self.trainer.count_correct(self.trainer.awaited(source, DTYPES[self.recipe.model.dtype]))
        self.trainer.recorder.discard()
        return accuracy_of(counts, self.feed.test_samples * self.feed.labels_per_sample)

    def _results(self, accuracy: Accuracy, samples: float, seconds: float) -> dict[str, Any]:
        return result_metrics(accuracy, samples / max(seconds, 1e-9), self.feed.labels_per_sample)

    def _rows(self, reply: Reply, results: dict[str, Any]) -> list[tuple[str, str]]:
        """Return the results of the run, for its last table."""
        return [
            *result_rows(results),
            ("steps of all workers", f"{reply.cut}"),
            ("time", f"{reply.elapsed:.2f} s"),
        ]

    def _metrics(self, reply: Reply, header: WorkerHeader, accuracy: Accuracy) -> dict[str, Any]:
        samples = reply.loss_samples + header.samples
        return {
            "epoch": reply.ended,
            "step": reply.cut,
            "learning_rate": self._rate(),
            "loss": (reply.loss + header.loss) / max(1, samples),
            **self._results(accuracy, samples, reply.epoch_seconds),
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
            self.display.log(f"resume with: unisono train --resume {self.home}")
        return STOPPED if stopped else 0

    def _receive_reply(self, server: int = 0) -> Reply:
        numbers = torch.empty(reply_length(self.links.seats.workers), dtype=torch.float64)
        self.links.links[server].receive(numbers)
        return decode_reply(numbers)

    def _fetch(self) -> None:
        """Store and evaluate the final centre."""
        began = time.perf_counter()
        reducer, header = self.trainer.reducer, self._header(Kind.FETCH)
        server_of = self.rule.server_of(reducer.programs.layout())
        replies = []
        for server, link in enumerate(self.links.links):
            link.announce(header.encode())
            replies.append(self._receive_reply(server))
            for key, its in server_of.items():
                if its == server:
                    link.receive(self.exchange.centre[key])
            if server == 0 and self.exchange.centre_buffers is not None:
                link.receive(self.exchange.centre_buffers)
        accuracy = self._store(replies, header._replace(samples=0, loss=0.0))
        assert accuracy is not None, "an epoch ends with the final centre"
        results = self._results(accuracy, replies[0].samples, replies[0].elapsed)
        self.display.end(self._rows(replies[0], results), dict(zip(KINDS, replies[0].seconds, strict=True)))
        self.display.log(f"run: {self.home}")
        self.display.log(last_line(results))
        self.trainer.recorder.add("waiting", time.perf_counter() - began)
