"""Sign on a terminal that ranks are starting: they import packages for seconds before the first prints a line."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

ERASE = "\x1b[K"
"""Control code that erases a terminal's line from the cursor to its end."""


class StartSign:
    """Seconds since the ranks were started, in a terminal's last line; elsewhere nothing.

    The cursor stays at the beginning of that line, so what a rank prints replaces it.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._begun = ranks, time.monotonic()
        self._shown, self._active = -1, sys.stdout.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def show(self) -> None:
        """Show the seconds if they have changed."""
        seconds = int(time.monotonic() - self._begun)
        if self._active and seconds != self._shown:
            self._shown = seconds
            words = f"starting {self._ranks} rank{'s' * (self._ranks > 1)}: {seconds} s"
            print(words, end="\r", flush=True)

    def clear(self) -> None:
        """Erase the sign, for good."""
        if self._shown >= 0:
            print(ERASE, end="", flush=True)
        self._shown, self._active = -1, False
