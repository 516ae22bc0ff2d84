"""The slots of one node's ranks, in a window that all see: what does not lie in a window itself goes through them.

Three slots a rank take turns, by the number of the coming meeting. A slot that is written before meeting m is read
until, at the latest, its reader comes to meeting m+2, and is not written again before meeting m+3, when all have been
to m+2.
"""

from __future__ import annotations

import numpy as np

from unisono.transports.arithmetic import Array
from unisono.transports.room import SLOTS
from unisono.transports.signals import Signals
from unisono.transports.window import Window


class Slots:
    """Slots of `nbytes` in a window of the ranks of a node, who meet by `signals` and free them together."""

    def __init__(self, window: Window, nbytes: int, signals: Signals) -> None:
        self._signals, self._window = signals, window
        self.nbytes = nbytes
        """Bytes of a slot."""
        whole = [np.frombuffer(buffer, np.uint8) for buffer in window.buffers]
        self.all = [[line[number * nbytes : (number + 1) * nbytes] for line in whole] for number in range(SLOTS)]
        """By number every rank's slot, as bytes."""

    @property
    def number(self) -> int:
        """The number of the slots of the coming meeting."""
        return (self._signals.turn + 1) % SLOTS

    @property
    def coming(self) -> list[Array]:
        """Every rank's slot of the coming meeting, as bytes."""
        return self.all[self.number]

    def free(self) -> None:
        """Give the memory back, all ranks together. Views on it must not be used any more."""
        self.all.clear()
        self._window.free()
