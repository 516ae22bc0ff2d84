"""A worker's end of its exchanges: what it has sent, what has come, and the orders that came with it.

main thread      prepare(header) ── step ──────────────── reply() ── orders
communication         └ announce, swap 1, swap 2 ...        ▲
update                                       replied, pull 1, pull 2, update ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unisono.asynchronous.coding import Coding, PlainCoding
from unisono.asynchronous.messages import Order, Reply, WorkerHeader, decode_reply, reply_length


class LastExchange(NamedTuple):
    """Exchange that has ended on a worker."""

    replies: list[Reply]
    """Reply of each server."""
    centre: dict[int, torch.Tensor]
    """Centre that came, by key."""


class WorkerExchange:
    """Exchange of one worker with all servers. Tensors of buckets are flat, as the layout has them."""

    def __init__(self, workers: int, coding: Coding | None = None) -> None:
        self._workers, self.coding = workers, coding or PlainCoding()
        self._header = WorkerHeader().encode()
        self._replies: dict[int, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.last: LastExchange | None = None
        """The last exchange in which all servers have replied; None before the first."""
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
        came = torch.empty_like(flat)
        link.swap(flat, came)
        self.centre_buffers = came

    def replied(self) -> None:
        """Take a snapshot if a server has ordered one: all has come, and nothing is applied."""
        if self.reply.orders & Order.SAVE:
            self.snapshot = self.take()
        self.last = LastExchange(self.replies(), dict(self.centre))

    def pull(self, key: int, flat: torch.Tensor, alpha: float) -> None:
        """Move the numbers of a bucket, as they were sent, by the share `alpha` towards the centre, in place."""
        mine, its = self._known.pop(key)
        flat.sub_((mine - its).mul_(alpha))

    @property
    def reply(self) -> Reply:
        """Reply of the first server to the last exchange."""
        return decode_reply(self._replies[0])

    def replies(self) -> list[Reply]:
        """Return the reply of each server to the last exchange."""
        return [decode_reply(self._replies[server]) for server in sorted(self._replies)]
