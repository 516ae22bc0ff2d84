"""Port of a server: arrivals of workers, links to them, and what is known of their processes."""

from __future__ import annotations

from typing import Protocol

import torch

from unisono.asynchronous.messages import WorkerHeader


class WorkerLink(Protocol):
    """Link of a server to a worker."""

    def send(self, mine: torch.Tensor) -> None:
        """Send a tensor."""

    def receive(self, came: torch.Tensor) -> None:
        """Receive a tensor."""

    def swap(self, mine: torch.Tensor, came: torch.Tensor) -> None:
        """Send one tensor and receive another, at the same time."""


class Port(Protocol):
    """Arrivals of workers at a server, and links to them."""

    def poll(self) -> tuple[int, WorkerHeader] | None:
        """Return a worker that has announced itself, and its header; None where there is none."""

    def link(self, worker: int) -> WorkerLink:
        """Return the link to a worker."""

    def dead(self) -> frozenset[int]:
        """Return the workers that are known to have died."""

    def stopped(self, worker: int) -> bool:
        """Return True for a worker whose process is known to be stopped (SIGSTOP)."""

    def lost(self, error: Exception) -> bool:
        """Return True for an error of a message that only means that its other end has died."""
