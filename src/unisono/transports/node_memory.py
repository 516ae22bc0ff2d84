"""What the ranks of one node share: their signals, their slots, and the windows that tensors live in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.mpi import MPI
from unisono.transports.passing import Passing
from unisono.transports.slots import Slots
from unisono.transports.staging import Staging
from unisono.transports.windows import Signals, Window


class NodeMemory:
    """Made, used and freed by all ranks of `comm` together, who share a node.

    `ranks` are what the user knows them as, `one_of_several` says whether there are other nodes; `interrupted` is
    called now and then while waiting, and raises to end the wait.
    """

    def __init__(
        self, comm: MPI.Intracomm, ranks: Sequence[int], interrupted: Callable[[], None], one_of_several: bool
    ) -> None:
        self._comm = comm
        self.signals = Signals(comm, ranks, interrupted, one_of_several)
        self._slots = Slots(comm, self.signals)
        self.staging = Staging(self.signals, self._slots)
        self.passing = Passing(self.signals, self._slots)
        self._windows: dict[int, Window] = {}  # by the address of the own part

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor, zeroed, in memory that all ranks of the node see."""
        if length == 0:
            return torch.empty(0, dtype=dtype)
        window = Window(self._comm, length * dtype.itemsize)
        tensor = torch.frombuffer(window.own, dtype=dtype, count=length)
        tensor.zero_()
        self._windows[tensor.data_ptr()] = window
        return tensor

    def find(self, address: int, nbytes: int) -> tuple[str, list[Any]] | None:
        """The bytes from `address` if they lie in a window: where, in words, and as each rank holds them; else None."""
        for number, (start, window) in enumerate(self._windows.items()):
            if start <= address and address + nbytes <= start + window.nbytes:
                first = address - start
                views = [memoryview(buffer)[first : first + nbytes] for buffer in window.buffers]
                return f"window {number} from byte {first}", views
        return None

    def free(self) -> None:
        """Give all memory back. Tensors in windows must not be used any more."""
        for window in self._windows.values():
            window.free()
        self._windows.clear()
        self.staging.forget()
        self._slots.free()
        self.signals.free()
