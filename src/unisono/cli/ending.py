"""The end of a rank: MPI is finalized first, while the witness still watches.

as Python does it     tell the witness ─ MPI_Finalize: a death here has no name
here                  MPI_Finalize ─ tell the witness
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


class Ending:
    """Ends this process if it is one of several ranks.

    Make it before anything else registers at exit. If MPI has begun already, the process belongs to another program,
    which ends it.
    """

    def __init__(self) -> None:
        self._size = ranks_started(os.environ) or 1
        self._code: int | None = None
        self._ours = self._size > 1 and "unisono.mpi" not in sys.modules
        if self._ours:
            atexit.register(self._finish)  # the first that is registered is called last

    def exit(self, code: int) -> None:
        """Exit with a code. All ranks call it together."""
        if self._size > 1 and code == INTERRUPTED:
            self.interrupt()
        if self._ours:
            self._code = code
            atexit.unregister(witness.tell)
            signal.signal(signal.SIGINT, lambda *_: self.interrupt())
            signal.signal(signal.SIGTERM, lambda *_: self.terminate())
        sys.exit(code)

    def interrupt(self) -> None:
        """End all ranks when this one is interrupted: in a common end, MPI would wait for the others for ever."""
        self._leave("was interrupted (SIGINT)", INTERRUPTED)

    def terminate(self) -> None:
        """End all ranks when this one gets SIGTERM while it ends: everything was saved by then."""
        self._leave("got SIGTERM while it ended, after all was saved", 128 + signal.SIGTERM)

    def _leave(self, what: str, code: int) -> None:
        number = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "?")
        witness.last_words(f"unisono: rank {number} of {self._size} {what}: all ranks end\n")
        mpi = sys.modules.get("unisono.mpi")
        if mpi is not None and mpi.MPI.Is_initialized() and not mpi.MPI.Is_finalized():
            mpi.MPI.COMM_WORLD.Abort(code)
        os._exit(code)

    def _finish(self) -> None:
        """Finalize MPI, after the exit handlers that were registered later than this object."""
        mpi = sys.modules.get("unisono.mpi")
        if self._code is None or mpi is None or not mpi.MPI.Is_initialized() or mpi.MPI.Is_finalized():
            return  # an uncaught exception, or a command without ranks: as Python does
        rank = mpi.MPI.COMM_WORLD.rank
        mpi.MPI.Finalize()
        witness.tell(rank)
