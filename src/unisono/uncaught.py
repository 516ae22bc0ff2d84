"""Hooks for uncaught exceptions: those in the main thread or in Unisono's threads end all ranks, others are reported.

location                            effect
main thread, Unisono's threads      earlier hook, traceback with the rank, all ranks end
other threads                       traceback with the rank; this rank continues, as in Python
children made by fork               earlier hook; only the child ends; MPI stays with its parent
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono import witness

ErrorType = type[BaseException]

THREAD_PREFIX = "unisono "
"""Prefix of the names of Unisono's own threads."""

EXCEPTION_CODE = 1
"""Exit code of ranks that an uncaught exception has ended."""

OWN_FOLDERS = (f"{Path(__file__).parent}/", *(sysconfig.get_path(name) for name in ("stdlib", "scripts")), "<frozen ")
"""Beginnings of the file names of Unisono, of Python's standard library, and of installed commands."""


def frames_of_program(error: BaseException | None, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame of the user's program on, without those that started it.

    A syntax error of the program has no frame of it, and needs none. Any other error without such a frame keeps all.
    """
    first = trace
    while first is not None and not is_of_program(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first if first is not None or isinstance(error, SyntaxError) else trace


def is_of_program(file: str) -> bool:
    """Return True if a file belongs to the program that is run, not to a library."""
    return not file.startswith(OWN_FOLDERS) and {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def install(rank: int, size: int, abort: Callable[[int], object]) -> None:
    """Install the hooks as `sys.excepthook` and `threading.excepthook`; they call the earlier ones first.

    `abort` ends all ranks with an exit code. A further call, after a death that this rank has survived,
    changes the rank, the size and `abort`.
    """
    hooks = getattr(sys.excepthook, "__self__", None)
    if isinstance(hooks, ExceptionHooks):
        hooks._rank, hooks._size, hooks._abort = rank, size, abort
        return
    hooks = ExceptionHooks(rank, size, abort)
    sys.excepthook, threading.excepthook = hooks.on_main_thread, hooks.on_other_thread


class ExceptionHooks:
    """Exception hooks of a rank's process, inactive in its children."""

    def __init__(self, rank: int, size: int, abort: Callable[[int], object]) -> None:
        self._rank, self._size, self._abort = rank, size, abort
        self._process = os.getpid()
        self._earlier_main_hook, self._earlier_thread_hook = sys.excepthook, threading.excepthook

    def on_main_thread(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        """Print the traceback and end all ranks; in a forked child, end only the child."""
        if os.getpid() != self._process:
            self._call(self._earlier_main_hook, kind, error, trace)
            sys.stdout.flush()
            os._exit(self._exit_code(kind))  # a normal exit would finalize MPI, which is its parent's
        if self._earlier_main_hook is not sys.__excepthook__:  # else the traceback would be printed twice
            self._call(self._earlier_main_hook, kind, error, trace)
        witness.report_abort(self._prefixed_traceback(kind, error, trace))
        self._abort(self._exit_code(kind))

    def on_other_thread(self, args: Any) -> None:
        """End all ranks if the thread is one of Unisono's, else print the exception with the rank."""
        name = args.thread.name if args.thread is not None else "?"
        if os.getpid() != self._process or args.exc_type is SystemExit:
            self._earlier_thread_hook(args)
            return
        if self._earlier_thread_hook is not threading.__excepthook__:
            self._call(self._earlier_thread_hook, args)
        if name.startswith(THREAD_PREFIX):
            witness.report_abort(self._prefixed_traceback(args.exc_type, args.exc_value, args.exc_traceback))
            self._abort(EXCEPTION_CODE)
        else:
            where = f", thread {name!r}, which ends"
            lines = self._prefixed_traceback(args.exc_type, args.exc_value, args.exc_traceback, where)
            print(lines, end="", file=sys.stderr, flush=True)

    @staticmethod
    def _exit_code(kind: ErrorType) -> int:
        return 130 if issubclass(kind, KeyboardInterrupt) else EXCEPTION_CODE

    def _prefixed_traceback(
        self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None, where: str = ""
    ) -> str:
        lines = "".join(traceback.format_exception(kind, error, frames_of_program(error, trace))).splitlines()
        return "".join(f"rank {self._rank} of {self._size}{where}: {line}\n" for line in lines)

    def _call(self, hook: Callable[..., object], *arguments: object) -> None:
        """Call an earlier hook; its own exceptions must not keep this rank from ending the others."""
        try:
            hook(*arguments)
        except Exception as error:  # noqa: BLE001 - arbitrary code
            print(f"rank {self._rank} of {self._size}: {hook!r} raised {error!r}", file=sys.stderr, flush=True)
