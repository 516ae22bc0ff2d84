"""Key-value store without servers: tensors that ranks push under a key are summed over all ranks, and all pull the sum.

    store = create("chain", world)
    store.init(key, weights)                 all have rank 0's
    store.push(key, gradient)                this rank's part of the sum: pack, then allreduce as the overlap places it
    store.pull(key, gradient)                the sum: unpack; returns at once; ...
    store.wait(key)                          ... waits until it is there

Keys are numbers from 0; all ranks make the same calls in the same order. Each call is a few tasks of a step program.
Source: MXNET-MPI, sections 3.3 and 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from unisono.engine.closing import Closing
from unisono.engine.communicator_pool import CommunicatorPool
from unisono.engine.dependencies import Variable
from unisono.engine.engine import Engine
from unisono.errors import UsageError
from unisono.step.build import CollectiveTasks
from unisono.step.costs import Duration
from unisono.step.layout import Layout
from unisono.step.operations import allreduce
from unisono.step.overlaps import Overlap, find_overlap
from unisono.step.play import Player
from unisono.step.program import UPDATE, Operation, Task, Value, bucket
from unisono.world import World

OUTSTANDING = 2
"""Largest number of collectives at once, where the overlap has several and no other number is given."""


def create(name: str, world: World, algorithm: str = "auto", wire: str | None = None) -> KVStore:
    """Return a store whose collectives follow an overlap: "funnel", "concurrent" or "chain".

    `algorithm` and `wire` are those of `world.allreduce`. Raises UsageError for an unknown name.
    """
    return KVStore(world, find_overlap(name), algorithm, wire)


class KeyState(NamedTuple):
    """Data that the tasks of one call act on."""

    memory: torch.Tensor
    """Memory that is sent for the key."""
    tensor: torch.Tensor
    """Tensor that was pushed, or is pulled into."""

    def bucket(self, _: int) -> torch.Tensor:
        """Return the memory that is sent."""
        return self.memory

    def sums(self, _: int) -> torch.Tensor:
        """Return the memory that is sent."""
        return self.memory

    def flags(self, _: int) -> torch.Tensor:
        """Return no flags: every pushed tensor is there."""
        return self.memory.view(-1)[:0]


def _copy_in(state: KeyState, _: Task, __: Any) -> None:
    state.memory.copy_(state.tensor)


def _copy_out(state: KeyState, _: Task, __: Any) -> None:
    state.tensor.copy_(state.memory)


def _nothing(*_: object) -> None:
    """Change no symbol."""


def _free(*_: object) -> Duration:
    return Duration(0.0)


PACK = Operation("pack", _copy_in, _nothing, _free)
UNPACK = Operation("unpack", _copy_out, _nothing, _free)


def value(key: int) -> Value:
    """Return the value of a key: the pushed tensor, and then the sum."""
    return Value("value", key)


class KVStore(Closing):
    """Store of one rank. All ranks of `world` construct one, and make the same calls in the same order."""

    def __init__(
        self,
        world: World,
        overlap: Overlap,
        algorithm: str = "auto",
        wire: str | None = None,
        outstanding: int = OUTSTANDING,
    ) -> None:
        """Start the engine. `outstanding`: largest number of collectives at once, where the overlap has several."""
        self._pool = CommunicatorPool(world)
        self._player = Player(self._pool, overlap.communicators(outstanding), "a store")
        self._world, self._allreduce = world, allreduce(algorithm, wire)
        self._sends = CollectiveTasks(Layout(world.size, 0, ()), overlap, outstanding)
        self._memory: dict[int, torch.Tensor] = {}  # sent for each key

    @property
    def engine(self) -> Engine:
        """Engine, for other operations that need the store's results: they read `variable(key)`."""
        return self._pool.engine

    def init(self, key: int, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor to all ranks, in place, and allocate memory for gradients of its shape and dtype. Raises
        UsageError for a key that was initialised before."""
        if key in self._memory:
            raise UsageError(f"key {key} has been initialised already")
        world = self._pool.worlds(1)[0]
        world.broadcast(tensor)
        self._memory[key] = world.empty(tensor.numel(), tensor.dtype).view(tensor.shape)

    def variable(self, key: int) -> Variable:
        """Return the engine's variable of a key. An operation that reads it waits for what was pulled; one that mutates
        it is waited for by later pushes."""
        return self._player.variable(value(key))

    def push(self, key: int, tensor: torch.Tensor) -> None:
        """Add a tensor to the sum over all ranks. It must not change until the key is waited for."""
        state = self._key_state(key, tensor)
        self._play(state, Task(PACK, key, UPDATE, (value(key),), (bucket(key),)))
        self._play(state, *self._sends.place(self._allreduce, key, (), (bucket(key),)))

    def pull(self, key: int, tensor: torch.Tensor) -> None:
        """Copy the sum of the tensors that all ranks have pushed into `tensor`."""
        self._play(self._key_state(key, tensor), Task(UNPACK, key, UPDATE, (bucket(key),), (value(key),)))

    def wait(self, *keys: int) -> None:
        """Wait until tensors pulled under these keys are ready. Raises OperationError when a collective has failed."""
        self._player.wait(*map(value, keys))

    def barrier(self) -> None:
        """Wait until all pushes and pulls are finished on all ranks."""
        self._player.wait()
        self._pool.worlds(1)[0].barrier()

    def close(self) -> None:
        """End the threads once all work is finished. Memory and communicators are freed with the world."""
        self._pool.close()
        self._memory.clear()

    def _play(self, state: KeyState, *tasks: Task) -> None:
        for ready in self._player.prepare(tasks):
            self._player.play(ready, state)  # type: ignore[arg-type]  # the replica of these operations alone

    def _key_state(self, key: int, tensor: torch.Tensor) -> KeyState:
        if key not in self._memory:
            raise UsageError(f"key {key} has not been initialised: call init({key}, ...) on all ranks first")
        memory = self._memory[key]
        if (tensor.shape, tensor.dtype) != (memory.shape, memory.dtype):
            raise UsageError(
                f"key {key} was initialised with {tuple(memory.shape)} of {memory.dtype}, "
                f"not with {tuple(tensor.shape)} of {tensor.dtype}"
            )
        return KeyState(memory, tensor)
