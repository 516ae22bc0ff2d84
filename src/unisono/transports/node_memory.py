"""Shared memory of the ranks of one node: their signals, their slots, and the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from unisono.mpi import MPI
from unisono.transports.reserve import reserve_slots
from unisono.transports.shared_memory import SharedMemory, allocate_shared
from unisono.transports.signals import Signals
from unisono.transports.slot_transfers import SlotTransfers
from unisono.transports.slots import Slots
from unisono.transports.staging import Staging
from unisono.transports.window import Window

SIGNALS = 8 << 10, 512
"""Bound on the bytes of a rank's signals in shared memory: a constant, and bytes per rank of the node."""


def make_node_memory(
    comm: MPI.Intracomm, ranks: Sequence[int], check_interrupt: Callable[[], None]
) -> NodeMemory | None:
    """Return the shared memory of the ranks of `comm`, on one node; None on all of them without enough memory.

    All of them make it together. `ranks` are their numbers in error messages. `check_interrupt` is called regularly in
    waits, and raises to end them.
    """
    window, slot = reserve_slots(comm, SIGNALS[0] + SIGNALS[1] * comm.size)
    if window is None:
        return None
    return NodeMemory(comm, Signals(comm, ranks, check_interrupt), window, slot)


class NodeMemory:
    """Shared memory of one node; all ranks of `comm`, which share the node, use and free it together."""

    def __init__(self, comm: MPI.Intracomm, signals: Signals, window: Window, slot: int) -> None:
        self._comm = comm
        self.signals = signals
        self._slots = Slots(window, slot, signals)
        self.slot = slot
        """Size of a slot in bytes."""
        self.staging = Staging(self.signals, self._slots)
        self.slot_transfers = SlotTransfers(self.signals, self._slots)
        self._shared: dict[int, SharedMemory] = {}  # by number; without those that are no longer referenced
        self._made = 0

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat, zeroed tensor in shared memory of the node, or in the rank's own if none can be shared.

        The memory lives as long as the tensor and all views of it.
        """
        if length == 0:
            return torch.empty(0, dtype=dtype)
        shared = allocate_shared(self._comm, length * dtype.itemsize, self._made)
        self._made += 1
        if shared is None:
            return torch.zeros(length, dtype=dtype)
        self._shared[shared.number] = shared
        return shared.tensor(length, dtype, partial(_drop, self._shared, shared.number))

    def find(self, address: int, nbytes: int) -> SharedMemory | None:
        """Return the shared memory that contains `nbytes` bytes at `address`; None if none does."""
        for shared in list(self._shared.values()):
            if shared.start <= address and address + nbytes <= shared.start + shared.nbytes:
                return shared
        return None

    def free(self) -> None:
        """Free all memory except that of live tensors."""
        for number in list(self._shared):
            _drop(self._shared, number)
        self.staging.clear()
        self._slots.free()
        self.signals.free()


def _drop(shared: dict[int, SharedMemory], number: int) -> None:
    if (released := shared.pop(number, None)) is not None:
        released.clear_plans()
