"""Both ends of an exchange: a worker's, with the orders that come with it, and the centre of a server.

main thread      prepare(header) ── step ──────────────── reply() ── orders
communication         └ announce, swap 1, swap 2 ...        ▲
update                                       replied, pull 1, pull 2, update ...

worker 2 comes ─▶ send c, receive x ─▶ c += α (x - c) ─▶ next worker

With a narrow number format each end sends the change since the two last exchanged:

    worker     x - r ─▶ 16 bits ─▶ x' = r + what was sent        r: the centre as this pair last saw it, the same
    server     c - r ─▶ 16 bits ─▶ c' = r + what was sent           on both ends; from now on r = c'
               both move by α (x' - c')

A change is small, so its rounding is too; what one exchange loses, the next one sends, because r is what came and not
what was meant. Weights themselves rounded to bfloat16 would jump by up to 1/256 of their size in every exchange.
Memory: one copy of the model on a worker, and one for each worker on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from unisono.asynchronous.messages import Order, Reply, WorkerHeader, decode_reply, reply_length
from unisono.wires import wire_of


class WorkerExchange:
    """Exchange of one worker with all servers. Tensors of buckets are flat, as the layout has them."""

    def __init__(self, workers: int, coding: Coding | None = None) -> None:
        self._workers, self.coding = workers, coding or Coding()
        self._header = WorkerHeader().encode()
        self._replies: dict[int, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.last: tuple[list[Reply], dict[int, torch.Tensor]] | None = None
        """Replies and centre of the last exchange in which all servers have replied; None before the first."""
        self.centre: dict[int, torch.Tensor] = {}
        """Centre as it came last, by key."""
        self.centre_buffers: torch.Tensor | None = None
        """Buffers of the centre as they came last, as bytes."""
        self.snapshot: dict[str, Any] | None = None
        """State of this worker when it sent its weights, where a server has ordered to save it."""
        self.take: Callable[[], dict[str, Any]] = dict
        """Function that returns a copy of the worker's state; called before anything that came is applied."""

    def prepare(self, header: WorkerHeader) -> None:
        """Set the header of the next exchange."""
        self._header = header.encode()
        self.snapshot = None

    def announce(self, server: int, link: Any) -> None:
        """Send the header to a server and receive its reply."""
        link.announce(self._header)
        reply = torch.empty(reply_length(self._workers), dtype=torch.float64)
        link.receive(reply)
        self._replies[server] = reply

    def swap(self, key: int, flat: torch.Tensor, link: Any) -> None:
        """Send the weights of a bucket and receive the centre's."""
        self._known[key] = self.coding.swap(key, flat, link)
        self.centre[key] = self._known[key][1]

    def swap_buffers(self, flat: torch.Tensor, link: Any) -> None:
        """Send this model's buffers, as bytes, and receive the centre's."""
        received = torch.empty_like(flat)
        link.swap(flat, received)
        self.centre_buffers = received

    def replied(self) -> None:
        """Take a snapshot if a server has ordered one: all has come, and nothing is applied."""
        replies = self.replies()
        if replies[0].orders & Order.SAVE:
            self.snapshot = self.take()
        self.last = replies, dict(self.centre)

    def pull(self, key: int, flat: torch.Tensor, alpha: float) -> None:
        """Move the numbers of a bucket, as they were sent, by the share `alpha` towards the centre, in place."""
        sent, centre = self._known.pop(key)
        flat.sub_((sent - centre).mul_(alpha))

    def replies(self) -> list[Reply]:
        """Return the reply of each server to the last exchange."""
        return [decode_reply(self._replies[server]) for server in sorted(self._replies)]


class Coding:
    """Exchange of numbers as they are, or of changes since the last exchange of this pair in a wire format."""

    def __init__(
        self, wire: str | None = None, worker: bool = False, references: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Start from `references`, by key, where there is a wire: equal on both ends. `worker`: True on the worker's
        end."""
        self._wire, self._worker, self.references = wire, worker, dict(references or {})

    def swap(self, key: int, flat: torch.Tensor, link: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Send `flat`, or its change, and receive the other end's. Return both numbers as both ends know them."""
        wire = wire_of(self._wire, flat.dtype)
        if wire is None:
            received = torch.empty_like(flat)
            link.swap(flat, received)
            return flat, received
        reference = self.references[key]
        change, received_change = (flat - reference).numpy(), np.empty(len(flat), reference.numpy().dtype)
        sent, encoded = (np.zeros(wire.nbytes(len(flat)), np.uint8) for _ in range(2))
        wire.encode(change, sent)
        link.swap(torch.from_numpy(sent), torch.from_numpy(encoded))
        wire.decode(encoded, received_change)
        both = reference + torch.from_numpy(change), reference + torch.from_numpy(received_change)
        self.references[key] = both[1] if self._worker else both[0]
        return both


class Centre:
    """Centre of a server. It is the replica that the tasks of its programs act on, and its own end of exchanges."""

    def __init__(
        self,
        flats: Mapping[int, torch.Tensor],
        codings: Callable[[int], Coding] | None = None,
        buffers: torch.Tensor | None = None,
        average: Callable[[torch.Tensor, torch.Tensor, float], None] | None = None,
    ) -> None:
        """Keep `flats`, by key. `codings` returns the coding of a worker's exchanges; `buffers` are the model's, as
        bytes, which `average(buffers, others, alpha)` moves by the share alpha towards the others."""
        self.flats, self.flat_buffers, self._average = dict(flats), buffers, average
        self.reply = torch.empty(0)
        """Reply to the worker that is served, to be sent."""
        self.worker = 0
        """Worker that is served."""
        self._codings = codings or (lambda _: Coding())
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._received_buffers: torch.Tensor | None = None

    @property
    def exchange(self) -> Centre:
        """This end of an exchange."""
        return self

    def bucket(self, key: int) -> torch.Tensor:
        return self.flats[key]

    def buffers(self) -> torch.Tensor:
        assert self.flat_buffers is not None, "a program that swaps buffers has some"
        return self.flat_buffers

    def keep_sent(self) -> None:
        """Go on with copies: what is still being sent stays as it is."""
        self.flats = {key: flat.clone() for key, flat in self.flats.items()}
        if self.flat_buffers is not None:
            self.flat_buffers = self.flat_buffers.clone()

    def announce(self, _: int, link: Any) -> None:
        """Send the reply to a worker, whose header has come."""
        link.send(self.reply)

    def swap(self, key: int, flat: torch.Tensor, link: Any) -> None:
        """Send the centre's bucket and receive the worker's."""
        self._known[key] = self._codings(self.worker).swap(key, flat, link)

    def move(self, key: int, alpha: float) -> None:
        """Move a bucket by the share `alpha` towards the worker's."""
        centre, weights = self._known.pop(key)
        self.flats[key].add_((weights - centre).mul_(alpha))

    def swap_buffers(self, flat: torch.Tensor, link: Any) -> None:
        """Send the centre's buffers and receive the worker's."""
        self._received_buffers = torch.empty_like(flat)
        link.swap(flat, self._received_buffers)

    def move_buffers(self, alpha: float) -> None:
        """Move the buffers by the share `alpha` towards the worker's."""
        assert self._received_buffers is not None and self._average is not None, "they were swapped before"
        self._average(self.buffers(), self._received_buffers, alpha)
