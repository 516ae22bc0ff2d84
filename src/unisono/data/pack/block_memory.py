"""Memory for blocks that are read from files, used again once nothing refers to it.

    read block 0 ──▶ memory A ── views of its samples ── the last one is dropped ──▶ A is spare
    read block 1 ──▶ memory B                                                        read block 2 ──▶ memory A

New memory costs as much as the read itself: the system clears its pages one by one when they are first touched. Views
of samples outlive the block, so only the end of the last view says that memory is spare. A weak reference sees it.

Sizes are rounded up, so that blocks of a pack, of 4 MB each, fit the same memory. Memory that fits no block is dropped
for each that is allocated, so there is never more than was in use at once.
"""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

UNIT = 256 << 10
"""Bytes to whose multiple sizes are rounded up; smaller reads get memory that is not kept."""

MAX_EXCESS = 2
"""Largest size of spare memory that is used, as a multiple of the size that is needed."""

Bytes = NDArray[np.uint8]


class BlockMemory:
    """Memory for blocks; any thread asks for it, and any thread drops the last view."""

    def __init__(self) -> None:
        """Begin without memory."""
        self._spare: dict[int, list[Bytes]] = {}

    def __call__(self, nbytes: int) -> Bytes:
        """Return memory of `nbytes` bytes, writable, with any content."""
        if nbytes < UNIT:
            return np.empty(nbytes, np.uint8)
        size = -(-nbytes // UNIT) * UNIT
        memory = self._take(size)
        if memory is None:
            memory = np.empty(size, np.uint8)
        # by way of a memoryview: NumPy would make views of views refer to `memory` itself, and not to `lease`
        lease = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(lease, self._give_back, memory).atexit = False
        return lease

    def _take(self, size: int) -> Bytes | None:
        """Return spare memory that fits; if there is none, drop one of another size and return None."""
        for found in sorted(self._spare):
            if size <= found <= MAX_EXCESS * size and (memory := _pop(self._spare[found])) is not None:
                return memory
        for found in sorted(self._spare, reverse=True):
            if _pop(self._spare[found]) is not None:
                break
        return None

    def _give_back(self, memory: Bytes) -> None:
        self._spare.setdefault(len(memory), []).append(memory)


def _pop(spare: list[Bytes]) -> Bytes | None:
    """Return the last of a list that other threads change, too; None if there is none."""
    try:
        return spare.pop()
    except IndexError:
        return None
