"""A key-value store without servers: what ranks push under a key is summed over all, and pulled by all.

    store = create("chain", world)
    store.init(key, weights)                 all have rank 0's
    store.push(key, gradient)                this rank's part of the sum
    store.pull(key, gradient)                the sum; nobody waits until ...
    store.wait(key)                          ... somebody needs it

Keys are numbers from 0; all ranks make the same calls in the same order. How the exchange goes on beside what the
program does is the embedding's affair (`embeddings/`). Source: MXNET-MPI, sections 3.3 and 4.
"""

from __future__ import annotations

from functools import partial

import torch

from unisono.engine.carrier import Action, Carrier
from unisono.engine.closing import Closing
from unisono.engine.dependencies import Variable
from unisono.engine.embeddings import OUTSTANDING, Embedding, find_embedding, gradient
from unisono.engine.engine import Engine
from unisono.engine.exchanges import Exchanges
from unisono.errors import UsageError
from unisono.world import World


def create(name: str, world: World, algorithm: str = "auto", wire: str | None = None) -> KVStore:
    """A store whose exchanges are embedded as `name` says: "funnel", "concurrent" or "chain".

    `algorithm` and `wire` are those of `world.allreduce`. Raises UsageError for an unknown name.
    """
    return KVStore(world, find_embedding(name), algorithm, wire)


class KVStore(Closing):
    """The store of one rank. All ranks of `world` make one, and make the same calls in the same order."""

    def __init__(
        self,
        world: World,
        embedding: Embedding,
        algorithm: str = "auto",
        wire: str | None = None,
        outstanding: int = OUTSTANDING,
    ) -> None:
        """`outstanding` are the exchanges that may go on at once where the embedding has several."""
        self._algorithm, self._wire = algorithm, wire
        self._exchanges = Exchanges(world, outstanding)
        self._carrier = Carrier(self._exchanges, embedding, "a store")
        self._buffers: dict[int, torch.Tensor] = {}

    @property
    def engine(self) -> Engine:
        """For other operations that need what the store brings: they read `variable(key)`."""
        return self._exchanges.engine

    def init(self, key: int, value: torch.Tensor) -> None:
        """Give all ranks rank 0's `value`, in place, and make room for gradients of its shape and dtype."""
        if key in self._buffers:
            raise UsageError(f"key {key} has been initialised already")
        worlds = self._carrier.worlds
        world = worlds[key % len(worlds)]
        world.broadcast(value)
        self._buffers[key] = world.empty(value.numel(), value.dtype).view(value.shape)

    def variable(self, key: int) -> Variable:
        """Who reads it waits for what was pulled under the key; who mutates it, what is pushed under it waits for."""
        return self._carrier.variable(gradient(key))

    def push(self, key: int, value: torch.Tensor) -> None:
        """Add `value` to the sum of all ranks. It must stay as it is until the key is waited for."""
        self._check(key, value)
        self._carrier.push(key, self._actions(key, value))

    def pull(self, key: int, out: torch.Tensor) -> None:
        """Bring the sum of what all ranks have pushed into `out`."""
        self._check(key, out)
        self._carrier.pull(key, self._actions(key, out))

    def wait(self, *keys: int) -> None:
        """Wait until what was pulled under these keys is there. Raises OperationError when an exchange has failed."""
        self._carrier.wait(*map(gradient, keys))

    def barrier(self) -> None:
        """Wait until all that was pushed and pulled is over on all ranks."""
        self._carrier.wait()
        self._carrier.worlds[0].barrier()

    def close(self) -> None:
        """End the threads once all is over. Memory and communicators go with the world."""
        self._exchanges.close()
        self._buffers.clear()

    def _check(self, key: int, value: torch.Tensor) -> None:
        if key not in self._buffers:
            raise UsageError(f"key {key} has not been initialised: call init({key}, ...) on all ranks first")
        room = self._buffers[key]
        if (value.shape, value.dtype) != (room.shape, room.dtype):
            raise UsageError(
                f"key {key} was initialised with {tuple(room.shape)} of {room.dtype}, "
                f"not with {tuple(value.shape)} of {value.dtype}"
            )

    def _actions(self, key: int, value: torch.Tensor) -> dict[str, Action]:
        room = self._buffers[key]
        exchange = partial(_exchange, tensor=room, algorithm=self._algorithm, wire=self._wire)
        return {"pack": lambda _: room.copy_(value), "exchange": exchange, "unpack": lambda _: value.copy_(room)}


def _exchange(world: World, tensor: torch.Tensor, algorithm: str, wire: str | None) -> None:
    world.allreduce(tensor, algorithm, wire)
