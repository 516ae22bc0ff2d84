"""Ranks that are threads of this process: on nodes of their own, or on one, where they share memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from unisono.data.storage import sample_store
from unisono.placement import regular

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


class NodeWorld:
    """A world of threads whose ranks sit on one node."""

    def __init__(self, world: Any) -> None:
        self.nodes, self.placement, self._world = 1, regular(1, 1, world.size), world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    @property
    def comm(self) -> Any:
        """What windows are made with."""
        return self._world

    def barrier(self) -> None:
        self._world.all_gather_object(None)

    def split(self, color: int) -> NodeWorld:
        return NodeWorld(self._world.split(color))


class ThreadWindow:
    """A window whose ranks are threads. It begins with junk, as memory may."""

    def __init__(self, comm: Any, nbytes: int) -> None:
        self._comm, self.buffers = comm, comm.all_gather_object(np.full(nbytes, 0xA5, np.uint8))

    def free(self) -> None:
        for buffer in self._comm.all_gather_object(self.buffers[self._comm.rank]):
            buffer[:] = 0x5A  # whoever still looks sees junk
        self._comm.all_gather_object(None)


@pytest.fixture(scope="session")
def on_one_node(on_ranks: OnRanks) -> Iterator[OnRanks]:
    """Calls a function on a number of ranks that share memory, each with its world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_store, "allocate_window", ThreadWindow)
        yield lambda ranks, work: on_ranks(ranks, lambda world: work(NodeWorld(world)))


@pytest.fixture(scope="session", params=["one node", "a node each"])
def anywhere(request: pytest.FixtureRequest, on_ranks: OnRanks, on_one_node: OnRanks) -> OnRanks:
    """Both: memory that is shared, and messages."""
    return on_one_node if request.param == "one node" else on_ranks
