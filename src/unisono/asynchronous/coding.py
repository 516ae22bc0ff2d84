"""Narrow number formats for exchanges with a centre: each end sends the change since the two last exchanged.

    worker     x - r ─▶ 16 bits ─▶ x' = r + what was sent        r: the centre as this pair last saw it, the same
    server     c - r ─▶ 16 bits ─▶ c' = r + what was sent           on both ends; from now on r = c'
               both move by α (x' - c')

A change is small, so its rounding is too; what one exchange loses, the next one sends, because r is what came and not
what was meant. Weights themselves rounded to bfloat16 would jump by up to 1/256 of their size in every exchange.
Memory: one copy of the model on a worker, and one for each worker on the server.
"""

from __future__ import annotations

import numpy as np
import torch

from unisono.asynchronous.link import PeerLink
from unisono.wires import wire_of


class PlainCoding:
    """Exchange of numbers as they are."""

    def swap(self, _: int, mine: torch.Tensor, link: PeerLink) -> tuple[torch.Tensor, torch.Tensor]:
        """Send `mine` and receive the other end's. Return both as both ends know them."""
        came = torch.empty_like(mine)
        link.swap(mine, came)
        return mine, came


class ReferenceCoding:
    """Exchange of changes since the last exchange of this pair, in a wire format."""

    def __init__(self, wire: str, worker: bool, references: dict[int, torch.Tensor]) -> None:
        """Start from `references`, by key: equal on both ends. `worker`: True on the worker's end."""
        self._wire, self._worker = wire, worker
        self.references = references

    def swap(self, key: int, mine: torch.Tensor, link: PeerLink) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the change of `mine` and receive the other end's. Return both numbers as both ends know them."""
        reference, wire = self.references[key], wire_of(self._wire, mine.dtype)
        if wire is None:
            return PlainCoding().swap(key, mine, link)
        change, other = (mine - reference).numpy(), np.empty(len(mine), reference.numpy().dtype)
        sent, came = (np.empty(wire.nbytes(len(mine)), np.uint8) for _ in range(2))
        wire.encode(change, sent)
        link.swap(torch.from_numpy(sent), torch.from_numpy(came))
        wire.decode(came, other)
        both = reference + torch.from_numpy(change), reference + torch.from_numpy(other)
        self.references[key] = both[1] if self._worker else both[0]
        return both


Coding = PlainCoding | ReferenceCoding
