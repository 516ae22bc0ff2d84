"""What the ranks of one node share: their signals, their slots, and the windows that tensors live in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from unisono.call import Call
from unisono.mpi import MPI
from unisono.transports.arithmetic import Step
from unisono.transports.passing import Passing
from unisono.transports.reserve import reserve_slots
from unisono.transports.shared_memory import SharedMemory, share
from unisono.transports.signals import Signals
from unisono.transports.slots import Slots
from unisono.transports.staging import Staging
from unisono.transports.window import Window

SIGNALS = 8 << 10, 512
"""Bytes of shared memory that the signals of a rank take at most, and for each rank of the node."""


def make_node_memory(comm: MPI.Intracomm, ranks: Sequence[int], interrupted: Callable[[], None]) -> NodeMemory | None:
    """What the ranks of `comm`, who share a node, share; None on all of them where shared memory has no room for it.

    Made by all of them together. `ranks` are what the user knows them as; `interrupted` is called now and
    then while waiting, and raises to end the wait.
    """
    window, slot = reserve_slots(comm, SIGNALS[0] + SIGNALS[1] * comm.size)
    if window is None:
        return None
    return NodeMemory(comm, Signals(comm, ranks, interrupted), window, slot)


class NodeMemory:
    """Used and freed by all ranks of `comm` together, who share a node."""

    def __init__(self, comm: MPI.Intracomm, signals: Signals, window: Window, slot: int) -> None:
        self._comm = comm
        self.signals = signals
        self._slots = Slots(window, slot, signals)
        self.slot = slot
        """Bytes of a slot."""
        self.staging = Staging(self.signals, self._slots)
        self.passing = Passing(self.signals, self._slots)
        self._shared: dict[int, SharedMemory] = {}  # by number; what nothing refers to any more is not in it
        self._made = 0
        self.sweeps: dict[tuple[int, int], tuple[list[Step], Call]] = {}
        """Steps of allreduces in shared memory, by address and the number of their call."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor, zeroed, in memory that all ranks of the node see, or the rank's own where none can be shared.

        The memory lasts as long as the tensor, and whatever was made of it.
        """
        if length == 0:
            return torch.empty(0, dtype=dtype)
        shared = share(self._comm, length * dtype.itemsize, self._made)
        self._made += 1
        if shared is None:
            return torch.zeros(length, dtype=dtype)
        self._shared[shared.number] = shared
        return shared.tensor(length, dtype, partial(_drop, self._shared, shared.number))

    def find(self, address: int, nbytes: int) -> SharedMemory | None:
        """The shared memory in which the bytes from `address` lie, if they do."""
        for shared in list(self._shared.values()):
            if shared.start <= address and address + nbytes <= shared.start + shared.nbytes:
                return shared
        return None

    def free(self) -> None:
        """Give all memory back but that which tensors refer to."""
        for number in list(self._shared):
            _drop(self._shared, number)
        self.staging.forget()
        self._slots.free()
        self.signals.free()


def _drop(shared: dict[int, SharedMemory], number: int) -> None:
    if (gone := shared.pop(number, None)) is not None:
        gone.forget()
