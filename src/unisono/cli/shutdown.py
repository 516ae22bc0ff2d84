"""Orderly end of a rank: MPI is finalized first, while the witness still watches.

Python's own order    notify the witness ─ MPI_Finalize: a rank that dies here is not reported
here                  MPI_Finalize ─ notify the witness
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from unisono import witness
from unisono.launch import RANK_VARIABLES, ranks_started

INTERRUPTED = 130
"""Exit code after SIGINT, as Typer returns it."""


class Shutdown:
    """Exit of this process, if it is one of several ranks.

    Create it before anything else registers with atexit. If MPI is initialized already, the process belongs to another
    program, which ends it.
    """

    def __init__(self) -> None:
        self._size = ranks_started(os.environ) or 1
        self._code: int | None = None
        self._active = self._size > 1 and "unisono.mpi" not in sys.modules
        if self._active:
            atexit.register(self._finish)  # registered first, called last

    def exit(self, code: int) -> None:
        """Exit with a code. All ranks call it together."""
        if self._size > 1 and code == INTERRUPTED:
            self.interrupt()
        if self._active:
            self._code = code
            atexit.unregister(witness.notify)
            signal.signal(signal.SIGINT, lambda *_: self.interrupt())
            signal.signal(signal.SIGTERM, lambda *_: self.terminate())
        sys.exit(code)

    def interrupt(self) -> None:
        """End all ranks when this one is interrupted: MPI_Finalize would wait for the others forever."""
        self._abort("was interrupted (SIGINT)", INTERRUPTED)

    def terminate(self) -> None:
        """End all ranks when this one gets SIGTERM during its exit, after everything was saved."""
        self._abort("got SIGTERM during its exit, after everything was saved", 128 + signal.SIGTERM)

    def _abort(self, what: str, code: int) -> None:
        number = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "?")
        witness.report_abort(f"unisono: rank {number} of {self._size} {what}: all ranks end\n")
        mpi = sys.modules.get("unisono.mpi")
        if mpi is not None and mpi.MPI.Is_initialized() and not mpi.MPI.Is_finalized():
            mpi.MPI.COMM_WORLD.Abort(code)
        os._exit(code)

    def _finish(self) -> None:
        """Finalize MPI, after the exit handlers that were registered later than this object."""
        mpi = sys.modules.get("unisono.mpi")
        if self._code is None or mpi is None or not mpi.MPI.Is_initialized() or mpi.MPI.Is_finalized():
            return  # an uncaught exception, or a command without ranks: Python's own order
        rank = mpi.MPI.COMM_WORLD.rank
        mpi.MPI.Finalize()
        witness.notify(rank)
