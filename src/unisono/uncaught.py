"""Hooks for uncaught exceptions: those of a rank's work end all ranks, others are only reported.

where                               what
main thread, Unisono's threads      earlier hook, traceback with the rank, all ranks end
other threads                       traceback with the rank; this rank goes on, as Python does
children made by fork               earlier hook; the child ends alone, and leaves MPI to its parent
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from unisono import witness

OWN = "unisono "
"""Prefix of the names of Unisono's own threads."""


def install(rank: int, size: int, abort: Callable[[int], object]) -> None:
    """Install the hooks as `sys.excepthook` and `threading.excepthook`; they call the earlier ones first.

    `abort` ends all ranks with an exit code. Further calls do nothing.
    """
    if isinstance(getattr(sys.excepthook, "__self__", None), Hooks):
        return
    hooks = Hooks(rank, size, abort)
    sys.excepthook, threading.excepthook = hooks.of_main, hooks.of_thread


class Hooks:
    """Exception hooks of one process that is a rank; its children are none."""

    def __init__(self, rank: int, size: int, abort: Callable[[int], object]) -> None:
        self._rank, self._size, self._abort = rank, size, abort
        self._process = os.getpid()
        self._of_main, self._of_thread = sys.excepthook, threading.excepthook

    def of_main(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        """End all ranks after printing the traceback; a child made by fork ends alone."""
        if os.getpid() != self._process:
            self._call(self._of_main, kind, error, trace)
            sys.stdout.flush()
            os._exit(self._code(kind))  # at a common exit the child would end MPI, which is its parent's
        if self._of_main is not sys.__excepthook__:  # else the traceback came twice
            self._call(self._of_main, kind, error, trace)
        witness.last_words(self._told(kind, error, trace, ""))
        self._abort(self._code(kind))

    def of_thread(self, args: Any) -> None:
        """End all ranks where the thread is Unisono's own, else print the exception with the rank."""
        name = args.thread.name if args.thread is not None else "?"
        if os.getpid() != self._process or args.exc_type is SystemExit:
            self._of_thread(args)
            return
        if self._of_thread is not threading.__excepthook__:
            self._call(self._of_thread, args)
        if name.startswith(OWN):
            witness.last_words(self._told(args.exc_type, args.exc_value, args.exc_traceback, ""))
            self._abort(1)
        else:
            words = self._told(args.exc_type, args.exc_value, args.exc_traceback, f", thread {name!r}, which ends")
            print(words, end="", file=sys.stderr, flush=True)

    @staticmethod
    def _code(kind: type[BaseException]) -> int:
        return 130 if issubclass(kind, KeyboardInterrupt) else 1

    def _told(
        self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, where: str
    ) -> str:
        lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
        return "".join(f"rank {self._rank} of {self._size}{where}: {line}\n" for line in lines)

    def _call(self, hook: Callable[..., object], *arguments: object) -> None:
        """Call an earlier hook; its own exceptions must not keep this rank from ending the others."""
        try:
            hook(*arguments)
        except Exception as error:  # noqa: BLE001 - anybody's code
            print(f"rank {self._rank} of {self._size}: {hook!r} raised {error!r}", file=sys.stderr, flush=True)
