"""Memory that the ranks of one node share: their slots, for data on its way, and the memory of tensors.

slots     each rank has three, in a window, and uses them cyclically, by the number of the next barrier. A slot written
          before barrier m is read, at the latest, until its reader enters barrier m+2. It is written again only after
          barrier m+2, which all have then entered, for barrier m+3

tensors   rank 0    file without a name ── own mapping ──▶ tensor ──▶ views, NumPy arrays     unmapped after the last
                                        └─ rank 1's mapping                                   kept as long as rank 1's

Each rank makes the file of a tensor (memfd), which the others open through /proc. No file is ever left in a folder, and
the size of /dev/shm is no limit. Ranks need not free it together: each unmaps memory that it no longer needs, and the
last unmapping frees the pages.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from unisono.mpi import MPI, allreduce_min
from unisono.transports.barriers import SIGNALS_BYTES, Signals
from unisono.transports.window import SLOTS_PER_RANK, Window, reserve_slots

MAX_PIECE_BYTES, MAX_SHARED_PIECE_BYTES = 256 << 10, 512 << 10
"""Largest piece in bytes, by measurement: three slots stay in a second-level cache of 1 MiB. Longer where ranks share
cores: there a barrier costs more."""


def make_node_memory(
    comm: MPI.Intracomm, ranks: Sequence[int], check_interrupt: Callable[[], None]
) -> NodeMemory | None:
    """Return the shared memory of the ranks of `comm`, on one node; None on all of them without enough memory.

    All of them make it together. `ranks` are their numbers in error messages. `check_interrupt` is called regularly in
    waits, and raises to end them.
    """
    window, slot = reserve_slots(comm, SIGNALS_BYTES)
    if window is None:
        return None
    signals = Signals(comm, ranks, check_interrupt, window, SLOTS_PER_RANK * slot)
    return NodeMemory(comm, signals, window, slot)


class NodeMemory:
    """Shared memory of one node; all ranks of `comm`, which share the node, use and free it together."""

    def __init__(self, comm: MPI.Intracomm, signals: Signals, window: Window, slot: int) -> None:
        self._comm, self._window = comm, window
        self.signals, self.rank, self.size = signals, comm.rank, comm.size
        self.slot = slot
        """Size of a slot in bytes."""
        self.piece = min(slot, MAX_SHARED_PIECE_BYTES if signals.share_cores else MAX_PIECE_BYTES)
        """Bytes of a payload that go through a slot at a time."""
        starts = [buffer.address for buffer in window.buffers]
        self.addresses = [[start + index * slot for start in starts] for index in range(SLOTS_PER_RANK)]
        """Addresses of the slots of all ranks, by slot."""
        self._shared: dict[int, SharedMemory] = {}  # by index; without those that are no longer referenced
        self._made = 0

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat, zeroed tensor in shared memory of the node, or in the rank's own if none can be shared.

        The memory lives as long as the tensor and all views of it.
        """
        if length == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        shared = allocate_shared(self._comm, length * dtype.itemsize, self._made)
        self._made += 1
        if shared is None:
            return torch.zeros(length, dtype=dtype, device="cpu")
        self._shared[shared.index] = shared
        return shared.tensor(length, dtype, partial(_drop, self._shared, shared.index))

    def find(self, address: int, nbytes: int) -> SharedMemory | None:
        """Return the shared memory that contains `nbytes` bytes at `address`; None if none does."""
        for shared in list(self._shared.values()):
            if shared.start <= address and address + nbytes <= shared.start + shared.nbytes:
                return shared
        return None

    def free(self) -> None:
        """Free all memory except that of live tensors. Views of the slots must not be used afterwards."""
        for index in list(self._shared):
            _drop(self._shared, index)
        self.signals.free()
        self._window.free()


def _drop(shared: dict[int, SharedMemory], index: int) -> None:
    if (dropped := shared.pop(index, None)) is not None:
        while dropped.on_drop:
            dropped.on_drop.pop()()


class SharedMemory:
    """Mappings of the memory of all ranks of a node, including the own; `allocate_shared` makes it."""

    def __init__(self, mappings: list[torch.Tensor], rank: int, index: int) -> None:
        self.index = index
        """Index of this memory: equal on all ranks, whichever memory each has freed before."""
        self.start, self.nbytes = mappings[rank].data_ptr(), mappings[rank].numel()
        self._mappings, self._own = mappings, mappings[rank]
        self.starts = [mapping.data_ptr() for mapping in mappings]
        """Addresses of the memory of all ranks."""
        self.on_drop: set[Callable[[], None]] = set()
        """Functions that are called once the mappings are dropped: they forget what was prepared for this memory."""

    def tensor(self, length: int, dtype: torch.dtype, on_release: Callable[[], None]) -> torch.Tensor:
        """Return a tensor of the own memory; `on_release` is called, in any thread, after its last view."""
        kept = self._own.numpy().view()  # an array of its own, which PyTorch keeps with the tensor's storage
        weakref.finalize(kept, on_release).atexit = False
        return torch.frombuffer(kept, dtype=dtype, count=length)


def allocate_shared(comm: MPI.Intracomm, nbytes: int, index: int) -> SharedMemory | None:
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
    return SharedMemory(mappings, comm.rank, index) if complete else None
