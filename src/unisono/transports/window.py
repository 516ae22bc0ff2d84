"""MPI shared windows: memory of each rank of a node, which all of them can access."""

from __future__ import annotations

from typing import Any

from unisono.mpi import MPI


class Window:
    """Window of `nbytes` bytes on each rank of `comm`, on one node; all of them make and free it together."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # each part near the rank that owns it
        self._window = MPI.Win.Allocate_shared(max(nbytes, 8), 1, info, comm)
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)  # no rank locks anything else, so no communication is needed
        comm.Barrier()  # waits on memory make no MPI progress: leave when no rank needs it
        self.nbytes = nbytes
        self.buffers: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(comm.size)]
        self.own = self.buffers[comm.rank]
        self.sync = self._window.Sync

    def free(self) -> None:
        """Free the memory. Views of it must not be used afterwards."""
        self._window.Unlock_all()
        self._window.Free()
