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

from collections import defaultdict
from types import TracebackType
from typing import Self

import torch

from unisono.engine.dependencies import Variable
from unisono.engine.embeddings import MAIN, Embedding, Task, find_embedding, gradient
from unisono.engine.engine import Engine
from unisono.errors import UsageError
from unisono.world import World

OUTSTANDING = 2
"""Exchanges that go on at once at most, where several may."""


def create(name: str, world: World, algorithm: str = "auto", wire: str | None = None) -> KVStore:
    """A store whose exchanges are embedded as `name` says: "funnel", "concurrent" or "chain".

    `algorithm` and `wire` are those of `world.allreduce`. Raises UsageError for an unknown name.
    """
    return KVStore(world, find_embedding(name), algorithm, wire)


class KVStore:
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
        self._algorithm, self._wire, self._embedding, self._outstanding = algorithm, wire, embedding, outstanding
        self._worlds = [world.split(0) for _ in range(outstanding if embedding.several else 1)]
        self.engine = Engine({"communication": len(self._worlds), "update": 1})
        """For other operations that need what the store brings: they read `variable(key)`."""
        self._buffers: dict[int, torch.Tensor] = {}
        self._variables: defaultdict[tuple[str, int], Variable] = defaultdict(Variable)

    def init(self, key: int, value: torch.Tensor) -> None:
        """Give all ranks rank 0's `value`, in place, and make room for gradients of its shape and dtype."""
        if key in self._buffers:
            raise UsageError(f"key {key} has been initialised already")
        world = self._worlds[key % len(self._worlds)]
        world.broadcast(value)
        self._buffers[key] = world.empty(value.numel(), value.dtype).view(value.shape)

    def variable(self, key: int) -> Variable:
        """Who reads it waits for what was pulled under the key; who mutates it, what is pushed under it waits for."""
        return self._variable(gradient(key))

    def push(self, key: int, value: torch.Tensor) -> None:
        """Add `value` to the sum of all ranks. It must stay as it is until the key is waited for."""
        self._check(key, value)
        for task in self._embedding.push(key, self._outstanding):
            self._carry_out(task, key, value)

    def pull(self, key: int, out: torch.Tensor) -> None:
        """Bring the sum of what all ranks have pushed into `out`."""
        self._check(key, out)
        for task in self._embedding.pull(key, self._outstanding):
            self._carry_out(task, key, out)

    def wait(self, *keys: int) -> None:
        """Wait until what was pulled under these keys is there. Raises OperationError when an exchange has failed."""
        self.engine.wait(*map(self.variable, keys))

    def barrier(self) -> None:
        """Wait until all that was pushed and pulled is over on all ranks."""
        self.engine.wait(*self._variables.values())
        self._worlds[0].barrier()

    def close(self) -> None:
        """Give threads, memory and communicators back, all ranks together."""
        self.engine.close()
        self._buffers.clear()
        for world in self._worlds:
            world.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _check(self, key: int, value: torch.Tensor) -> None:
        if key not in self._buffers:
            raise UsageError(f"key {key} has not been initialised: call init({key}, ...) on all ranks first")
        room = self._buffers[key]
        if (value.shape, value.dtype) != (room.shape, room.dtype):
            raise UsageError(
                f"key {key} was initialised with {tuple(room.shape)} of {room.dtype}, "
                f"not with {tuple(value.shape)} of {value.dtype}"
            )

    def _variable(self, tag: tuple[str, int]) -> Variable:
        variable = self._variables[tag]
        variable.name = f"{tag[0]} {tag[1]}"
        return variable

    def _carry_out(self, task: Task, key: int, value: torch.Tensor) -> None:
        """Have a task carried out where its kind says."""
        read, mutate = map(self._variable, task.read), map(self._variable, task.mutate)
        room, world = self._buffers[key], self._worlds[task.communicator]

        def action() -> None:
            with torch.no_grad():
                if task.what == "pack":
                    room.copy_(value)
                elif task.what == "exchange":
                    world.allreduce(room, self._algorithm, self._wire)
                elif task.what == "unpack":
                    value.copy_(room)
                else:
                    world.barrier()

        name = f"{task.what} {key}"
        if task.kind == MAIN:
            self.engine.carry_out(action, read, mutate, name)
        else:
            self.engine.push(action, read, mutate, task.kind, name)
