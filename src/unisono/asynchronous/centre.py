"""The centre of a server: the buckets that it keeps, moved by each worker's exchange.

worker 2 comes ─▶ send c, receive x ─▶ c += α (x - c) ─▶ next worker
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.asynchronous.coding import Coding, PlainCoding

AverageBuffers = Callable[[torch.Tensor, torch.Tensor, float], None]
"""Function (buffers, others, alpha): it moves the first by the share alpha towards the others, all as bytes."""


class Centre:
    """Centre of a server. It is the replica that the tasks of its programs act on."""

    def __init__(
        self,
        flats: Mapping[int, torch.Tensor],
        codings: Callable[[int], Coding] | None = None,
        buffers: torch.Tensor | None = None,
        average: AverageBuffers | None = None,
    ) -> None:
        """Keep `flats`, by key. `codings` returns the coding of a worker's exchanges; `buffers` are the model's, as
        bytes, which `average` moves."""
        self.flats = dict(flats)
        self.buffers = buffers
        self.reply = torch.empty(0)
        """Reply to the worker that is served, to be sent."""
        self.worker = 0
        """Worker that is served."""
        self._codings = codings or (lambda _: PlainCoding())
        self._average = average
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._came_buffers: torch.Tensor | None = None

    def announce(self, _: int, link: Any) -> None:
        """Send the reply to a worker, whose header has come."""
        link.send(self.reply)

    def swap(self, key: int, link: Any) -> None:
        """Send the centre's bucket and receive the worker's."""
        self._known[key] = self._codings(self.worker).swap(key, self.flats[key], link)

    def move(self, key: int, alpha: float) -> None:
        """Move a bucket by the share `alpha` towards the worker's."""
        mine, its = self._known.pop(key)
        self.flats[key].add_((its - mine).mul_(alpha))

    def swap_buffers(self, link: Any) -> None:
        """Send the centre's buffers and receive the worker's."""
        assert self.buffers is not None, "a program that swaps buffers has some"
        self._came_buffers = torch.empty_like(self.buffers)
        link.swap(self.buffers, self._came_buffers)

    def move_buffers(self, alpha: float) -> None:
        """Move the buffers by the share `alpha` towards the worker's."""
        assert self.buffers is not None and self._came_buffers is not None and self._average is not None
        self._average(self.buffers, self._came_buffers, alpha)
