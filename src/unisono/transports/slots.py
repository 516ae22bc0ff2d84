"""Slots of one node's ranks in a shared window: data that is not itself in shared memory goes through them.

Each rank uses its three slots cyclically, by the number of the next barrier. A slot written before barrier m is read,
at the latest, until its reader enters barrier m+2. It is written again only after barrier m+2, which all have then
entered, for barrier m+3.
"""

from __future__ import annotations

import numpy as np

from unisono.transports.arithmetic import Array
from unisono.transports.signals import Signals
from unisono.transports.slot_size import SLOTS_PER_RANK
from unisono.transports.window import Window


class Slots:
    """Slots of `nbytes` bytes in a window of a node's ranks. `signals` are their barriers; all free it together."""

    def __init__(self, window: Window, nbytes: int, signals: Signals) -> None:
        self._signals, self._window = signals, window
        self.nbytes = nbytes
        """Size of a slot in bytes."""
        whole = [np.frombuffer(buffer, np.uint8) for buffer in window.buffers]
        self.all = [[row[number * nbytes : (number + 1) * nbytes] for row in whole] for number in range(SLOTS_PER_RANK)]
        """Slots of all ranks, as bytes, by slot number."""

    @property
    def number(self) -> int:
        """Number of the slots for the next barrier."""
        return (self._signals.sequence + 1) % SLOTS_PER_RANK

    @property
    def next_slots(self) -> list[Array]:
        """Slots of all ranks for the next barrier, as bytes."""
        return self.all[self.number]

    def free(self) -> None:
        """Free the memory; called by all ranks together. Views of it must not be used afterwards."""
        self.all.clear()
        self._window.free()
