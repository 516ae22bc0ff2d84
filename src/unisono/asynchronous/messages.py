"""Headers of workers and replies of servers, as float64 numbers of a fixed length.

worker ── header: kind, step, samples, loss, request, times ──▶ server
worker ◀── Reply: number, progress, orders to the worker ────── server, then the weights cross
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from itertools import chain
from typing import NamedTuple

import torch

KINDS_OF_TIME = 5
"""Numbers of a header that hold seconds, one for each kind of the recorder."""


class Kind(IntEnum):
    """Purpose of a worker's header."""

    EXCHANGE = 0
    """Exchange of the weights."""
    ENDED = 1
    """The worker trains no more, and waits for its last order."""
    FETCH = 2
    """The worker asks for the final centre."""
    DONE = 3
    """The worker has stored the final centre: the server may end."""


class Request(IntEnum):
    """Request of a signal to a worker."""

    NONE = 0
    SAVE = 1
    STOP = 2


class Order(IntFlag):
    """Orders of a server to a worker."""

    NONE = 0
    SAVE = 1
    """Store this worker's state as it was when it sent its weights."""
    CENTRE = 2
    """Store the centre that came with this reply, and evaluate it where an epoch has ended."""
    STOP = 4
    """Train no more after this step."""
    FETCH = 8
    """Fetch the final centre from all servers, store and evaluate it."""
    CLOSE = 16
    """Tell all servers that the run is over."""
    LEAVE = 32
    """End: there is nothing left to do. With STOP: alone, before the run ends."""


class WorkerHeader(NamedTuple):
    """Header of a worker."""

    kind: Kind = Kind.EXCHANGE
    step: int = 0
    """Number of steps that the worker has made."""
    samples: int = 0
    """Samples of the steps since its last header."""
    loss: float = 0.0
    """Sum of the loss over these samples."""
    request: Request = Request.NONE
    seconds: tuple[float, ...] = (0.0,) * KINDS_OF_TIME
    """Seconds of each kind of time since the run began."""

    def encode(self) -> torch.Tensor:
        """Return the header as a float64 tensor."""
        numbers = (self.kind, self.step, self.samples, self.loss, self.request, *self.seconds)
        return torch.tensor(numbers, dtype=torch.float64)


HEADER_LENGTH = 5 + KINDS_OF_TIME


def decode_header(numbers: torch.Tensor) -> WorkerHeader:
    """Return the header that `encode` made a tensor."""
    kind, step, samples, loss, request, *seconds = numbers.tolist()
    return WorkerHeader(Kind(int(kind)), int(step), int(samples), loss, Request(int(request)), tuple(seconds))


class WorkerProgress(NamedTuple):
    """Progress of a worker as a server knows it."""

    step: int = 0
    """Number of steps that it had made at its last exchange."""
    exchange: int = -1
    """Number of its last exchange on this server; -1: it had none."""


class Reply(NamedTuple):
    """Reply of a server. All numbers are those before the exchange that it belongs to, but for `samples`."""

    exchanges: int = 0
    """Number of exchanges that the server has served before."""
    samples: int = 0
    """Samples that all workers have trained on, with those of the header that it answers."""
    samples_before: int = 0
    """The same without those."""
    orders: Order = Order.NONE
    epoch: int = 0
    """Number of epochs that have ended before."""
    ended: int = 0
    """Number of the epoch that ends with this exchange, from 1; 0: none."""
    loss: float = 0.0
    """Sum of the loss since the last epoch ended, without that of the header that it answers."""
    loss_samples: int = 0
    """Samples of that sum."""
    cut: int = 0
    """Steps of all workers: the name of the checkpoint that `SAVE` and `CENTRE` order."""
    elapsed: float = 0.0
    """Seconds since the run began."""
    epoch_seconds: float = 0.0
    """Seconds since the last epoch ended."""
    seconds: tuple[float, ...] = (0.0,) * KINDS_OF_TIME
    """Seconds of each kind of time, as the mean over the workers."""
    workers: tuple[WorkerProgress, ...] = ()
    """Progress of each worker before this exchange."""

    def encode(self) -> torch.Tensor:
        """Return the reply as a float64 tensor."""
        *plain, seconds, workers = self
        return torch.tensor([*plain, *seconds, *chain(*workers)], dtype=torch.float64)


PLAIN_FIELDS = len(Reply._fields) - 2


def reply_length(workers: int) -> int:
    """Return the number of float64 numbers of a reply."""
    return PLAIN_FIELDS + KINDS_OF_TIME + 2 * workers


def decode_reply(numbers: torch.Tensor) -> Reply:
    """Return the reply that `encode` made a tensor."""
    plain, seconds, progress = torch.split(numbers, [PLAIN_FIELDS, KINDS_OF_TIME, len(numbers) - reply_length(0)])
    exchanges, samples, before, orders, epoch, ended, loss, loss_samples, cut, elapsed, since = plain.tolist()
    workers = tuple(WorkerProgress(*map(int, pair)) for pair in progress.view(-1, 2).tolist())
    first = (int(exchanges), int(samples), int(before), Order(int(orders)), int(epoch), int(ended), loss)
    return Reply(*first, int(loss_samples), int(cut), elapsed, since, tuple(seconds.tolist()), workers)
