"""Memory of each rank of a node, shared by all its ranks; it lives as long as any reference on this rank.

    rank 0   file without a name ── own mapping ──▶ tensor ──▶ views, NumPy arrays     unmapped after the last of them
                                 └─ rank 1's mapping                                   kept as long as rank 1's tensor

Each rank makes its file (memfd), which the others open through /proc. No file is ever left in a folder, and the size
of /dev/shm is no limit. Ranks need not free it together: each unmaps memory that it no longer needs, and the last
unmapping frees the pages.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from unisono.mpi import MPI, allreduce_min


class SharedMemory:
    """Mappings of the memory of all ranks of a node, including the own; `allocate_shared` makes it."""

    def __init__(self, mappings: list[torch.Tensor], rank: int, number: int) -> None:
        self.number = number
        """Number of this memory: equal on all ranks, whichever memory each has freed before."""
        self.start, self.nbytes = mappings[rank].data_ptr(), mappings[rank].numel()
        self._own = mappings[rank]
        self.buffers: list[Any] = [memoryview(mapping.numpy()) for mapping in mappings]  # type: ignore[arg-type]
        """Memory of each rank, by rank."""
        self._plans: dict[int, dict[Any, Any]] = {}

    def tensor(self, length: int, dtype: torch.dtype, on_release: Callable[[], None]) -> torch.Tensor:
        """Return a tensor of the own memory; `on_release` is called, in any thread, after its last view."""
        kept = self._own.numpy().view()  # an array of its own, which PyTorch keeps with the tensor's storage
        weakref.finalize(kept, on_release).atexit = False
        return torch.frombuffer(kept, dtype=dtype, count=length)

    def plan(self, plans: dict[Any, Any]) -> None:
        """Register plans that hold views of this memory; `clear_plans` clears them."""
        self._plans[id(plans)] = plans

    def clear_plans(self) -> None:
        """Clear the plans for this memory."""
        for plans in self._plans.values():
            plans.clear()
        self._plans.clear()


def allocate_shared(comm: MPI.Intracomm, nbytes: int, number: int) -> SharedMemory | None:
    """Return `nbytes` bytes of zeroed memory on each rank of `comm`, on one node; called by all of them together.

    None on all ranks if one cannot make its file, or open another's: a container may refuse the one, and processes that
    are hidden from each other share nothing.
    """
    mappings: list[torch.Tensor] = []
    name = f"unisono-{secrets.token_hex(8)}"  # a process of another container may have the same number
    file: int | None = None
    try:
        with suppress(OSError):
            file = os.memfd_create(name)
            os.ftruncate(file, nbytes)
        files = comm.allgather((f"/proc/{os.getpid()}/fd/{file}", name))
        with suppress(OSError, RuntimeError):
            for path, named in files:
                if str(Path(path).readlink()) == f"/memfd:{named} (deleted)":
                    mappings.append(torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8))
        if len(mappings) == comm.size:
            mappings[comm.rank].zero_()  # touched first here, so that the pages lie near this rank
        complete = allreduce_min(comm, len(mappings) == comm.size)
    finally:
        if file is not None:
            os.close(file)
    return SharedMemory(mappings, comm.rank, number) if complete else None
