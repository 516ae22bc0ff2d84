"""Replay of a server's log: its exchanges take the place of the server's own choice.

log of another run   2 0 1 0 ...     the next is 2: worker 0 waits, although it came first
worker 3             is not in it    its exchange is answered, and not applied
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from unisono.errors import StallError


class Replay:
    """Exchanges of a log that are still to come at one server."""

    def __init__(self, server: int, recorded: Sequence[int]) -> None:
        """Begin with the first exchange; `recorded` are the workers in the order of the log."""
        self._server, self._left = server, deque(recorded)

    @property
    def next(self) -> int | None:
        """Worker of the next exchange; None where no more were recorded."""
        return self._left[0] if self._left else None

    def needs(self, worker: int) -> bool:
        """Return True where a worker has exchanges to come."""
        return worker in self._left

    def choose(self, waiting: Sequence[int]) -> tuple[int | None, bool]:
        """Return the worker to serve next of those `waiting`, and False where no such exchange was recorded: it is not
        applied."""
        surplus = next((worker for worker in waiting if worker not in self._left), None)
        if surplus is not None:
            return surplus, False
        return self.next if self.next in waiting else None, True

    def advance(self) -> None:
        """Advance to the next exchange: this one was applied."""
        self._left.popleft()

    def error(self, worker: int, why: str, number: int) -> StallError:
        """Return the error of a recorded worker that does not come; `number` exchanges were applied."""
        return StallError(
            f"server {self._server}: the log that is replayed has worker {worker} in exchange "
            f"{number + self._left.index(worker)}, but it {why}: "
            "replay the run again, with all of its workers; if it is only slow, raise UNISONO_TIMEOUT"
        )
