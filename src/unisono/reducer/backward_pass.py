"""State of one backward pass: gradients that are ready, buckets that are full, and the work of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Protocol

import torch

from unisono.errors import UnisonoError, UsageError
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage, ControlResult, decode, difference_of, encode
from unisono.reducer.structure import digest
from unisono.step.layout import Layout
from unisono.step.operations import PACK, PACK_SUM, UPDATE_LOCAL
from unisono.step.program import Task
from unisono.step.replica import RuleMemory
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
        self,
        memory: BucketMemory,
        buffers: Buffers,
        layout: Layout,
        control_message: ControlMessage,
        optimizer: OptimizerStep | None = None,
        kept: RuleMemory | None = None,
    ) -> None:
        self.memory, self.layout = memory, layout
        self.kept = RuleMemory() if kept is None else kept
        """Tensors that the rule keeps between steps."""
        self._buffers, self._optimizer = buffers, optimizer
        self.control_message = control_message
        """Control message of this rank."""
        self.control_result: ControlResult | None = None
        """Sum of all ranks' control messages; None until it is known."""
        self.weight = 1.0
        """Factor of the gradients before they are summed; known once all ranks' samples are."""
        self._loss_weights: Sequence[float] = ()  # of all ranks, where parameters are split
        self._rank = 0
        self.discarded = False
        """True once the pass has failed: it has no further effect."""
        self.buffers_pending = False
        """True while rank 0's buffers are being sent, or have arrived and were not copied to the model."""
        self.lock = Lock()
        """Lock held while the pass is discarded, and while gradients are set."""
        self.ended = False
        """True once the backward pass has ended."""
        self.gradients: dict[int, torch.Tensor | None] = {}
        """Gradient of each parameter that is ready; None where there is none."""
        self.order: list[int] = []
        """Parameters in the order in which their gradients became ready."""
        self._missing_gradients = [0, *(len(one.parameters) for one in layout.buckets)]
        self._unpacked_parts = [len(keys) for keys in layout.keys_of]
        self._unset_parts = list(self._unpacked_parts)
        self._has_gradient: dict[int, bool] = {}
        self._submitted: set[int] = set()  # keys of buckets that were submitted
        self._norm: torch.Tensor | None = None  # of all ranks' gradients, where parameters are split

    def add(self, number: int, gradient: torch.Tensor | None) -> None:
        """Add a parameter's gradient. A second one (of another part of the backward pass) is added to the first.

        Raises UsageError when the first was already submitted.
        """
        keys = self.layout.keys_of[number]
        if number in self.gradients:
            before = self.gradients[number]
            if not self._submitted.isdisjoint(keys):
                raise UsageError(
                    f"parameter {number} got a gradient twice in one backward pass, the first is already submitted: "
                    "activation checkpointing needs use_reentrant=False"
                )
            self.gradients[number] = gradient if before is None or gradient is None else before + gradient
            return
        self.gradients[number] = gradient
        self.order.append(number)
        for key in keys:
            self._missing_gradients[key] -= 1

    def is_full(self, key: int) -> bool:
        """Return True where all gradients of a bucket are ready."""
        return not self._missing_gradients[key]

    def mark_submitted(self, task: Task) -> None:
        """Record that a task is about to run: a bucket that is packed, or applied, counts as submitted."""
        if task.operation in (PACK, PACK_SUM):
            self._submitted.add(task.key)
        elif task.operation is UPDATE_LOCAL:
            self._submitted.update(key for number in task.parameters for key in self.layout.keys_of[number])

    def discard(self) -> None:
        """Discard the pass: running tasks set no gradient from here on."""
        with self.lock:
            self.discarded = True

    def step_error(self, _: Sequence[str]) -> UnisonoError | None:
        """Return the error that the ranks have agreed on in the optimizer's step, with these names of parameters."""
        return None

    # Operations of tasks (`step/replica.py`)

    def agree(self, world: World) -> None:
        own = encode(self.control_message, world.rank, world.size)
        weights = [0.0] * world.size if self.memory.parts.groups else []
        if weights:
            weights[world.rank] = 1.0 if self.control_message.samples is None else self.control_message.samples
        total = torch.tensor([*own, *weights], dtype=torch.float64)
        world.allreduce(total)
        sums = total.tolist()
        control_result = decode(sums[: len(own)])
        self._loss_weights, self._rank = sums[len(own) :], world.rank
        if control_result.changes_differ:
            control_result = replace(control_result, difference=self._compare_weights(world))
        self.weight = control_result.weight_of(self.control_message)
        if control_result.error() is not None:
            self.discard()
        self.control_result = control_result

    def _compare_weights(self, world: World) -> str:
        """Return the error of all ranks where the weights that they all have differ; empty where they do not."""
        whole = [one for number, one in enumerate(self.memory.parameters) if self.memory.parts.of(number) == 1]
        table = torch.zeros(world.size, 3, dtype=torch.float64)
        changes = self.control_message.changes
        if changes is not None:
            table[world.rank] = torch.tensor([1.0, changes, digest(whole)], dtype=torch.float64)
        world.allreduce(table)
        counts = [int(count) if compared else None for compared, count, _ in table.tolist()]
        return difference_of(counts, [int(number) for number in table[:, 2].tolist()])

    def pack(self, key: int, scaled: bool = True) -> None:
        """Write gradients, times this rank's weight if `scaled`, into a bucket; release those of which all parts are
        packed."""
        bucket_slice = self.memory.bucket_slice(key)
        parts = bucket_slice.parts
        if parts > 1:
            weight = self.memory.parts.weight(self._loss_weights, self._rank, parts, mean=scaled)
        else:
            weight = self.weight if scaled else 1.0
        self.memory.pack(bucket_slice, self.gradients, weight)
        for number in bucket_slice.parameters:
            self._unpacked_parts[number] -= 1
            if not self._unpacked_parts[number]:
                self.gradients[number] = None

    def bucket(self, key: int) -> torch.Tensor:
        return self.memory.elements(self.memory.bucket_slice(key))

    def sums(self, key: int) -> torch.Tensor:
        bucket_slice = self.memory.bucket_slice(key)
        return self.bucket(key)[: bucket_slice.flags - bucket_slice.start]

    def flags(self, key: int) -> torch.Tensor:
        bucket_slice = self.memory.bucket_slice(key)
        return self.bucket(key)[bucket_slice.flags - bucket_slice.start :]

    def set_grads(self, key: int) -> None:
        """Make a bucket's sums the gradients of its parameters. A parameter without a gradient on any rank gets None.

        A parameter that is split gets its gradient with its last part; on several communicators that is any of them.
        """
        bucket_slice = self.memory.bucket_slice(key)
        flags = self.memory.flags(bucket_slice)
        with self.lock:
            self._has_gradient.update(zip(bucket_slice.ends, flags, strict=True))
            for number in bucket_slice.parameters:
                self._unset_parts[number] -= 1
                if not self._unset_parts[number] and not self.discarded:
                    view = self.memory.views[number] if self._has_gradient[number] else None
                    self.memory.parameters[number].grad = view

    def sum_squares(self, world: World) -> None:
        total = torch.zeros((), dtype=torch.float64)
        for number, parameter in enumerate(self.memory.parameters):
            if parameter.grad is not None:
                square = torch.linalg.vector_norm(parameter.grad).double().square()
                total += square * self.memory.parts.of(number) / world.size
        self._norm = world.allreduce(total).sqrt()

    def clip(self) -> None:
        self._clip([one.grad for one in self.memory.parameters if one.grad is not None])

    def clip_local(self) -> None:
        self._clip([one for one in self.gradients.values() if one is not None])

    def update(self, parameters: Sequence[int]) -> None:
        assert self._optimizer is not None, "a program with updates has an optimizer"
        self._optimizer.update(parameters)

    def update_local(self, parameters: Sequence[int]) -> None:
        with self.lock:
            if not self.discarded:
                for number in parameters:
                    self.memory.parameters[number].grad = self.gradients[number]
                    self.gradients[number] = None
        self.update(parameters)

    def pack_weights(self, key: int, ranks: int) -> None:
        self.memory.pack_weights(self.memory.bucket_slice(key), ranks)

    def unpack_weights(self, key: int) -> None:
        self.memory.unpack_weights(self.memory.bucket_slice(key))

    def read_weights(self, key: int) -> torch.Tensor:
        return self.memory.read_weights(self.memory.bucket_slice(key))

    def write_weights(self, key: int, flat: torch.Tensor) -> None:
        self.memory.write_weights(self.memory.bucket_slice(key), flat)

    def fill_bucket(self, key: int, flat: torch.Tensor) -> None:
        self.bucket(key).copy_(flat)

    def pack_buffers(self) -> None:
        self.buffers_pending = True
        self._buffers.pack()

    def buffers(self) -> torch.Tensor:
        return self._buffers.flat

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        assert self.layout.clip is not None, "a program without clip has no clip task"
        norm = torch.nn.utils.get_total_norm(gradients) if self._norm is None else self._norm
        factor = torch.clamp(self.layout.clip / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
