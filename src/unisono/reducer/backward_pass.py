"""State of one backward pass: gradients that are ready, buckets that are full, and the work of its tasks."""

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
    """Optimizer step for one backward pass, with the options it had when the step began."""

    def update(self, parameters: Sequence[int]) -> None:
        """Make the step for these parameters, given by number."""


class BackwardPass:
    """Replica that one pass's tasks act on (`step/replica.py`). Buckets are identified by their keys.

    Buckets are sent in the order of the program, the same on all ranks, whichever fills first.
    """

    def __init__(
        self, memory: Memory, buffers: Buffers, layout: Layout, word: Word, optimizer: OptimizerStep | None = None
    ) -> None:
        self.memory, self.layout = memory, layout
        self._buffers, self._optimizer = buffers, optimizer
        self.word = word
        """Control word of this rank."""
        self.agreed: Agreed | None = None
        """Sum of all ranks' control words; None until it is known."""
        self.weight = 1.0
        """Factor of the gradients before they are summed; known once all ranks' samples are."""
        self.void = False
        """True once the pass has failed and may have no further effect."""
        self.buffers_come = False
        """True while rank 0's buffers are on their way, or have come and were not taken."""
        self.lock = Lock()
        """Lock held while the pass is made void, and while gradients are set unless it is void."""
        self.ended = False
        """True once the backward pass has ended."""
        self.fresh: dict[int, torch.Tensor | None] = {}
        """Gradient of each parameter that is ready; None where there is none."""
        self.order: list[int] = []
        """Parameters in the order in which their gradients came."""
        self._open = [0, *(len(one.parameters) for one in layout.buckets)]
        self._parts = [len(keys) for keys in layout.keys_of]
        self._unsettled = list(self._parts)
        self._there: dict[int, bool] = {}
        self._left: set[int] = set()  # keys of buckets that are on their way

    def add(self, number: int, gradient: torch.Tensor | None) -> None:
        """Add a parameter's gradient. A second one (of another part of the backward pass) is added to the first.

        Raises UsageError when the first is already on its way.
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
        """Return True where all gradients of a bucket are ready."""
        return not self._open[key]

    def note(self, task: Task) -> None:
        """Note that a task is about to run: a bucket that is packed, or applied, is on its way."""
        if task.operation is PACK:
            self._left.add(task.key)
        elif task.operation is UPDATE_ALONE:
            self._left.update(key for number in task.parameters for key in self.layout.keys_of[number])

    def drop(self) -> None:
        """Make the pass void: running tasks set no gradient from here on."""
        with self.lock:
            self.void = True

    # What tasks do

    def agree(self, world: World) -> None:
        """Sum the control words of all ranks. The pass becomes void where that shows an error."""
        total = torch.tensor(encode(self.word, world.rank, world.size), dtype=torch.float64)
        world.allreduce(total)
        agreed = decode(total.tolist())
        self.weight = agreed.weight_of(self.word)
        if agreed.error() is not None:
            self.drop()
        self.agreed = agreed

    def pack(self, key: int) -> None:
        """Write gradients, times this rank's weight, into a bucket; release those of which all parts are packed."""
        stretch = self.memory.stretch(key)
        self.memory.pack(stretch, self.fresh, self.weight)
        for number in stretch.parameters:
            self._parts[number] -= 1
            if not self._parts[number]:
                self.fresh[number] = None

    def bucket(self, key: int) -> torch.Tensor:
        """Return the elements of a bucket that are sent, as a flat tensor."""
        return self.memory.part(self.memory.stretch(key))

    def sums(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds gradients, without the flags behind it."""
        stretch = self.memory.stretch(key)
        return self.bucket(key)[: stretch.flags - stretch.start]

    def flags(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds the flags of its parameters: nonzero where any rank has a gradient."""
        stretch = self.memory.stretch(key)
        return self.bucket(key)[stretch.flags - stretch.start :]

    def settle(self, key: int) -> None:
        """Make a bucket's sums the gradients of its parameters. A parameter without a gradient on any rank gets None.

        A parameter that is cut gets its gradient with its last part: on several communicators any may come last.
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
        """Scale all gradients so that their common norm is at most the layout's `clip`."""
        self._clip([one.grad for one in self.memory.parameters if one.grad is not None])

    def clip_alone(self) -> None:
        """Scale all of this rank's own gradients so that their common norm is at most the layout's `clip`."""
        self._clip([one for one in self.fresh.values() if one is not None])

    def update(self, parameters: Sequence[int]) -> None:
        """Apply the optimizer's step to these parameters."""
        assert self._optimizer is not None, "the program has updates where there is an optimizer"
        self._optimizer.update(parameters)

    def update_alone(self, parameters: Sequence[int]) -> None:
        """Apply the optimizer's step to these parameters, with this rank's own gradients."""
        with self.lock:
            if not self.void:
                for number in parameters:
                    self.memory.parameters[number].grad = self.fresh[number]
                    self.fresh[number] = None
        self.update(parameters)

    def pack_weights(self, key: int) -> None:
        """Write weights, divided by the number of ranks, into a bucket."""
        self.memory.pack_weights(self.memory.stretch(key), self.layout.ranks)

    def unpack_weights(self, key: int) -> None:
        """Copy the contents of a bucket to the weights of its parameters."""
        self.memory.unpack_weights(self.memory.stretch(key))

    def pack_buffers(self) -> None:
        """Copy the model's present buffers to the memory they are sent from. All ranks will take rank 0's."""
        self.buffers_come = True
        self._buffers.pack()

    def buffers(self) -> torch.Tensor:
        """Return the memory that the model's buffers are sent in."""
        return self._buffers.flat

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        assert self.layout.clip is not None, "the program clips where it is asked to"
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(torch.clamp(self.layout.clip / (norm + 1e-6), max=1.0))


class End:
    """Callback for autograd at the end of a backward pass. Autograd drops it when the pass fails; `failed` is then
    called, before the program sees the failure."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed, self._called = ended, failed, False

    def __call__(self) -> None:
        self._ended()
        self._called = True

    def __del__(self) -> None:
        if not self._called:
            self._failed()
