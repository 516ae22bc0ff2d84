"""Key-value store without servers: tensors that ranks push under a key are summed over all ranks, and all pull the sum.

    store.init(key, weights)        all have rank 0's
    store.push(key, gradient)       this rank's part of the sum: pack, then allreduce as the overlap places it
    store.pull(key, gradient)       the sum: unpack; returns at once; ...
    store.wait(key)                 ... waits until it is there

4 ranks push 1, 2, 3 and 4 under key 0, whose value is 5; the updater computes stored - 0.1 sum:

    rank                   0   1   2   3
    pushed                 1   2   3   4
    pulled                10  10  10  10
    with the updater       4   4   4   4

Bytes of a push of n bytes on p ranks: those of an allreduce, 2 n (p - 1) / p sent by each rank; a pull sends nothing.
Each call is a few tasks of a step program. Source: MXNET-MPI, sections 3.3 and 4. Its pull has the allreduce (figures
11 and 12), and with it the dummy value that chains them. Here a push has both, in the order of pushes: a key that is
pushed and never pulled is summed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from operator import index
from typing import Any, NamedTuple

import torch

from unisono.device import computed_of, copy_behind
from unisono.engine import Closing, Engine, Variable
from unisono.engine.communicator_pool import CommunicatorPool
from unisono.errors import UsageError
from unisono.step.layout import Layout
from unisono.step.overlaps import CollectiveTasks, find_overlap
from unisono.step.play import Player
from unisono.step.program import UPDATE, Operation, Role, Task, Value, bucket
from unisono.step.rule import OUTSTANDING
from unisono.transports.arithmetic import DTYPES
from unisono.wires import WIRES
from unisono.world import World

Keys = int | Sequence[int]
"""Key, or several."""

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""Tensor of a key, or one for each of several keys."""

Updater = Callable[[int, torch.Tensor, torch.Tensor], object]
"""Function (key, sum of what all ranks have pushed, stored value) that changes the stored value in place."""


class KeyState(NamedTuple):
    """Data that the tasks of one call act on."""

    memory: torch.Tensor
    """Memory that is sent for the key."""
    tensor: torch.Tensor
    """Tensor that was pushed, or is pulled into."""
    stored: torch.Tensor
    """Value of the key: the sum, or what the updater made of the sums."""
    computed: Any = None
    """Event of the pushed tensor, where it is on a device; None on the host."""


PACK = Operation("pack", lambda state, _, __: copy_behind(state.memory, state.tensor, state.computed))
UNPACK = Operation("unpack", lambda state, _, __: copy_behind(state.tensor, state.stored, state.computed))

value = partial(Value, "value")
"""Value of a key: the pushed tensor, and then what was pulled."""

stored = partial(Value, "stored")
"""Value that the store keeps for a key, where it has an updater."""


class KVStore(Closing):
    """Sums of tensors over all ranks, by key. All ranks make the same calls in the same order.

    Keys are integers, given one at a time or as lists. Calls return at once, except `init`, `wait` and `barrier`.
    """

    def __init__(
        self,
        world: World,
        overlap: str = "chain",
        *,
        updater: Updater | None = None,
        algorithm: str = "auto",
        wire: str | None = None,
        outstanding: int = OUTSTANDING,
    ) -> None:
        """Start the engine. Collective. Raises UsageError for an unknown overlap or wire, or nothing outstanding.

        `overlap` is "chain" (as is "phases" here), "concurrent" or "funnel"; `outstanding` the largest number of
        collectives at once, where the overlap has several. With an `updater` the store keeps the initial values, and
        each push updates them, on every rank with the same sum, in the host's memory. `algorithm` and `wire` are those
        of `world.allreduce`.
        """
        placed = find_overlap(overlap)
        if wire is not None:
            WIRES.check(wire)
        if outstanding < 1:
            raise UsageError(f"outstanding = {outstanding}, but it has to be at least 1")
        self._pool, self._rank = CommunicatorPool(world), world.rank
        self._player = Player(self._pool, placed.communicators(outstanding), "a store")
        self._update = None
        if updater is not None:

            def update(state: KeyState, task: Task, _: Any) -> None:
                updater(task.key, state.memory, state.stored)

            self._update = Operation("update", update)
        self._allreduce = Operation(
            "allreduce", lambda state, _, world: world.allreduce(state.memory, algorithm, wire), role=Role.COLLECTIVE
        )
        self._sends = CollectiveTasks(Layout(world.size, 0, ()), placed, outstanding)
        self._memory: dict[int, torch.Tensor] = {}  # sent for each key
        self._stored: dict[int, torch.Tensor] = {}  # the same memory where there is no updater

    @property
    def engine(self) -> Engine:
        """Engine, for other operations that need the store's results: they read `variable(key)`."""
        return self._pool.engine

    def init(self, keys: Keys, tensors: Tensors) -> None:
        """Copy rank 0's tensors to all ranks, in place; they are the values until the first push. Collective.

        Later tensors of a key have the shape and dtype of the first. Raises UsageError for a key that was initialised
        before, or is there twice, and for a dtype that cannot be summed.
        """
        pairs = pair_keys(keys, tensors)
        numbers = [key for key, _ in pairs]
        for key, tensor in pairs:
            if tensor.dtype not in DTYPES:
                raise UsageError(
                    f"rank {self._rank}: key {key} has {tensor.dtype}, which cannot be summed: convert it, a complex "
                    "tensor by torch.view_as_real"
                )
            if key in self._memory or numbers.count(key) > 1:
                earlier = "has been initialised already" if key in self._memory else "is there twice"
                raise UsageError(f"rank {self._rank}: key {key} {earlier}; take another")
        for key, tensor in pairs:  # behind the collectives of earlier pushes
            begin = partial(self._begin, key, tensor)
            self.engine.carry_out(begin, (), (self._pool.exclusive(0),), f"init {key}")

    def variable(self, key: int) -> Variable:
        """Return the engine's variable of a key. An operation that reads it waits for what was pulled; one that mutates
        it is waited for by later pushes."""
        return self._player.variable(value(key))

    def push(self, keys: Keys, tensors: Tensors) -> None:
        """Add tensors to the sums over all ranks. They must not change until the keys are pulled and waited for.

        A push replaces the sum of the push before; with an updater, it updates the stored value. Raises UsageError for
        unknown keys and for other shapes or dtypes, before any tensor is sent.
        """
        for key, state in self._states(keys, tensors):
            self._play(state, Task(PACK, key, UPDATE, (value(key),), (bucket(key),)))
            self._play(state, *self._sends.place(self._allreduce, key, (), (bucket(key),)))
            if self._update is not None:
                self._play(state, Task(self._update, key, UPDATE, (bucket(key),), (stored(key),)))

    def pull(self, keys: Keys, tensors: Tensors) -> None:
        """Copy the values of the keys into `tensors`, complete after `wait`. Raises UsageError like `push`."""
        for key, state in self._states(keys, tensors):
            source = bucket(key) if self._update is None else stored(key)
            self._play(state, Task(UNPACK, key, UPDATE, (source,), (value(key),)))

    def wait(self, keys: Keys | None = None) -> None:
        """Wait until tensors pulled under these keys are ready; without keys, for all pushes and pulls.

        Raises OperationError when a collective or an updater has failed, UsageError for unknown keys.
        """
        several = () if keys is None else key_numbers(keys)
        self._player.wait(*(value(self._check(key)) for key in several))

    def barrier(self) -> None:
        """Wait until all pushes and pulls are finished on all ranks."""
        self._player.wait()
        self._pool.worlds(1)[0].barrier()

    def close(self) -> None:
        """End the threads once all work is finished. Memory and communicators are freed with the world."""
        self._pool.close()
        self._memory.clear()
        self._stored.clear()

    @torch.no_grad()  # weights are leaves of an autograd graph
    def _begin(self, key: int, tensor: torch.Tensor) -> None:
        world = self._pool.worlds(1)[0]
        world.broadcast(tensor)
        self._memory[key] = world.empty(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)
        self._stored[key] = self._memory[key] if self._update is None else self._memory[key].clone()

    def _play(self, state: KeyState, *tasks: Task) -> None:
        for ready in self._player.prepare(tasks):
            self._player.play(ready, state)  # type: ignore[arg-type]  # the replica of these operations alone

    def _check(self, key: int) -> int:
        if key not in self._memory:
            raise UsageError(
                f"rank {self._rank}: key {key} has not been initialised (keys are {sorted(self._memory)}); call "
                f"init({key}, ...) on all ranks first"
            )
        return key

    def _states(self, keys: Keys, tensors: Tensors) -> list[tuple[int, KeyState]]:
        """Return each key with the data of its tasks, all of them checked."""
        states = []
        for key, tensor in pair_keys(keys, tensors):
            self._check(key)
            memory = self._memory[key]
            if (tensor.shape, tensor.dtype) != (memory.shape, memory.dtype):
                raise UsageError(
                    f"rank {self._rank}: key {key} was initialised with {tuple(memory.shape)} of {memory.dtype}, not "
                    f"with {tuple(tensor.shape)} of {tensor.dtype}; push and pull tensors like the first"
                )
            states.append((key, KeyState(memory, tensor, self._stored[key], computed_of(tensor))))
        return states


def pair_keys(keys: Keys, tensors: Tensors) -> list[tuple[int, torch.Tensor]]:
    """Return each key with its tensor. Raises UsageError unless there is one for each."""
    if isinstance(keys, int | Integral) and isinstance(tensors, torch.Tensor):
        return [(index(keys), tensors)]
    if isinstance(keys, str | int | Integral) or isinstance(tensors, torch.Tensor):
        raise UsageError(
            f"keys are {keys!r} and tensors a {type(tensors).__name__}: give one integer and one tensor, or a list of "
            "each"
        )
    if len(keys) != len(tensors):
        raise UsageError(f"{len(keys)} keys {list(keys)} have {len(tensors)} tensors: give one for each key")
    pairs = list(zip(keys, tensors, strict=True))
    for key, tensor in pairs:
        if not isinstance(key, Integral):
            raise UsageError(f"key {key!r} is a {type(key).__name__}: keys are integers")
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"key {key} has a {type(tensor).__name__} in place of a tensor; for a weight without a gradient, push "
                "zeros, as all ranks must push the same keys"
            )
    return [(index(key), tensor) for key, tensor in pairs]


def key_numbers(keys: Keys) -> list[int]:
    return [index(keys)] if isinstance(keys, int | Integral) else [index(key) for key in keys]
