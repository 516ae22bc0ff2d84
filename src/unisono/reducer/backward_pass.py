"""One backward pass: which gradients are there, which buckets are full, and what tasks do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

import torch

from unisono.errors import UsageError
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import Agreed, Word, decode, encode
from unisono.reducer.memory import Memory
from unisono.step.layout import Layout
from unisono.step.operations import PACK, UPDATE_ALONE
from unisono.step.program import Task
from unisono.world import World


class OptimizerStep(Protocol):
    """The optimizer's step for one backward pass: its options are those of when the step began."""

    def update(self, parameters: Sequence[int]) -> None:
        """Make the step for some parameters."""


class BackwardPass:
    """The replica that one pass's tasks act on (`step/replica.py`). Buckets are known by their keys.

    They leave in the order of the program, whatever fills first: the same on all ranks.
    """

    def __init__(
        self, memory: Memory, buffers: Buffers, layout: Layout, word: Word, optimizer: OptimizerStep | None = None
    ) -> None:
        self.memory, self.layout = memory, layout
        self._buffers, self._optimizer = buffers, optimizer
        self.word = word
        """What this rank tells the others."""
        self.agreed: Agreed | None = None
        """What all have told; None until it is known."""
        self.weight = 1.0
        """What the gradients are multiplied by before they are summed; known when all ranks have told their samples."""
        self.void = False
        """True once nothing may come of it any more: it has failed."""
        self.buffers_come = False
        """True while rank 0's buffers are on their way, or have come and nobody has taken them."""
        self.lock = Lock()
        """Held by whoever makes it void, and by whoever sets gradients unless it is."""
        self.ended = False
        """True once the backward pass has ended."""
        self.fresh: dict[int, torch.Tensor | None] = {}
        """The gradient of each parameter that is there; None where there is none."""
        self.order: list[int] = []
        """The parameters as their gradients came."""
        self._open = [0, *(len(one.parameters) for one in layout.buckets)]
        self._parts = [len(keys) for keys in layout.keys_of]
        self._unsettled = list(self._parts)
        self._there: dict[int, bool] = {}
        self._left: set[int] = set()  # keys of buckets that are on their way

    def add(self, number: int, gradient: torch.Tensor | None) -> None:
        """Add a parameter's gradient. A second one (of another part of the backward pass) is added to the first.

        Raises UsageError when the first has left already.
        """
        keys = self.layout.keys_of[number]
        if number in self.fresh:
            before = self.fresh[number]
            if not self._left.isdisjoint(keys):
                raise UsageError(
                    f"parameter {number} has got a gradient twice in one backward pass, and the first was on its way: "
                    "activation checkpointing needs use_reentrant=False"
                )
            self.fresh[number] = gradient if before is None or gradient is None else before + gradient
            return
        self.fresh[number] = gradient
        self.order.append(number)
        for key in keys:
            self._open[key] -= 1

    def full(self, key: int) -> bool:
        """Return whether all gradients of a bucket are there."""
        return not self._open[key]

    def note(self, task: Task) -> None:
        """Note that a task is about to be carried out: a bucket that is packed, or applied, is on its way."""
        if task.operation is PACK:
            self._left.add(task.key)
        elif task.operation is UPDATE_ALONE:
            self._left.update(key for number in task.parameters for key in self.layout.keys_of[number])

    def drop(self) -> None:
        """Let nothing come of it: what is under way sets no gradient from here on."""
        with self.lock:
            self.void = True

    # What tasks do

    def agree(self, world: World) -> None:
        """Sum the control words of all ranks."""
        total = torch.tensor(encode(self.word, world.rank, world.size), dtype=torch.float64)
        world.allreduce(total)
        agreed = decode(total.tolist())
        self.weight = agreed.weight_of(self.word)
        if agreed.error() is not None:
            self.drop()
        self.agreed = agreed

    def pack(self, key: int) -> None:
        """Put gradients, times this rank's weight, into a bucket; let go of those of which no part is missing."""
        stretch = self.memory.stretch(key)
        self.memory.pack(stretch, self.fresh, self.weight)
        for number in stretch.parameters:
            self._parts[number] -= 1
            if not self._parts[number]:
                self.fresh[number] = None

    def bucket(self, key: int) -> torch.Tensor:
        """Return what travels in a bucket."""
        return self.memory.part(self.memory.stretch(key))

    def sums(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds gradients, without the flags behind it."""
        stretch = self.memory.stretch(key)
        return self.bucket(key)[: stretch.flags - stretch.start]

    def flags(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that says which parameters have a gradient: not 0 where any rank has one."""
        stretch = self.memory.stretch(key)
        return self.bucket(key)[stretch.flags - stretch.start :]

    def settle(self, key: int) -> None:
        """Make what lies in a bucket the gradients of its parameters; what no rank had a gradient for has none.

        A parameter that is cut has its gradient with its last part: on several communicators any may come last.
        """
        stretch = self.memory.stretch(key)
        flags = self.memory.flags(stretch)
        with self.lock:
            self._there.update(zip(stretch.ends, flags, strict=True))
            for number in stretch.parameters:
                self._unsettled[number] -= 1
                if not self._unsettled[number] and not self.void:
                    view = self.memory.views[number] if self._there[number] else None
                    self.memory.parameters[number].grad = view

    def clip(self) -> None:
        """Scale all gradients so that their common norm is at most the layout's."""
        self._clip([one.grad for one in self.memory.parameters if one.grad is not None])

    def clip_alone(self) -> None:
        """Scale all of this rank's own gradients so that their common norm is at most the layout's."""
        self._clip([one for one in self.fresh.values() if one is not None])

    def update(self, parameters: Sequence[int]) -> None:
        """Have the optimizer make its step for some parameters."""
        assert self._optimizer is not None, "the program has updates where there is an optimizer"
        self._optimizer.update(parameters)

    def update_alone(self, parameters: Sequence[int]) -> None:
        """Have the optimizer make its step for some parameters, with this rank's own gradients."""
        with self.lock:
            if not self.void:
                for number in parameters:
                    self.memory.parameters[number].grad = self.fresh[number]
                    self.fresh[number] = None
        self.update(parameters)

    def pack_weights(self, key: int) -> None:
        """Put weights, over the number of ranks, into a bucket."""
        self.memory.pack_weights(self.memory.stretch(key), self.layout.ranks)

    def unpack_weights(self, key: int) -> None:
        """Make what lies in a bucket the weights of its parameters."""
        self.memory.unpack_weights(self.memory.stretch(key))

    def pack_buffers(self) -> None:
        """Put the model's buffers, as they are now, where they travel: rank 0's are everybody's."""
        self.buffers_come = True
        self._buffers.pack()

    def buffers(self) -> torch.Tensor:
        """Return what travels of the model's buffers."""
        return self._buffers.flat

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        assert self.layout.clip is not None, "the program clips where it is asked to"
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(torch.clamp(self.layout.clip / (norm + 1e-6), max=1.0))


class End:
    """What autograd calls at the end of a backward pass. It forgets one whose pass has failed: then `failed` is called,
    before the program hears of the failure."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed, self._called = ended, failed, False

    def __call__(self) -> None:
        self._ended()
        self._called = True

    def __del__(self) -> None:
        if not self._called:
            self._failed()
