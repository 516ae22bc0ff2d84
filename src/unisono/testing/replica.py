"""Model of one rank in one process, trained by tasks in the plainest way: the oracle of `reducer/backward_pass.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.func import functional_call

from unisono.asynchronous.exchange import WorkerExchange
from unisono.optimizers.sharded import PlacedSegment, Segment, ShardedStep, segments_of
from unisono.rules.sharded import STEP
from unisono.step import operations as op
from unisono.step.layout import Layout, Updates
from unisono.step.program import Task
from unisono.step.replica import ANCHOR, RuleMemory
from unisono.step.shard_work import ShardWork
from unisono.transports.exact import ExactSums, Terms, integers

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Batch(NamedTuple):
    """Batch that a rank trains on in a step. A rank without a batch has None in its place."""

    inputs: torch.Tensor
    labels: torch.Tensor


class InProcessReplica:
    """Model of one rank, for any rule: gradients, buckets and updates are made in the plainest way."""

    exchange: WorkerExchange
    """Its end of exchanges with servers, where the rule has some."""
    shards: ShardWork
    """Work on its shards in this step, where the rule is sharded."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        layout: Layout,
        batches: Sequence[Batch | None],
    ) -> None:
        self.model, self.optimizer, self.loss, self.layout = model, optimizer, loss, layout
        self.rank = 0
        """Rank, which the player of several replicas sets."""
        self._batches = iter(batches)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self._batch: Batch | None = None
        self._samples, self._weight = 0, 0.0
        self._norm: float | None = None
        self._seen: dict[int, torch.Tensor] = {}
        self._fresh: dict[int, torch.Tensor | None] = {}
        self._gradients: dict[int, torch.Tensor | None] = {}
        self._unpacked: dict[int, int] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._terms: dict[int, Terms] = {}  # of buckets with exact sums
        self._exact = ExactSums(layout.ranks, self.sums, self._pieces, lambda tensor, _: tensor.reshape(-1))
        self.integers, self.maxima, self.decode = self._exact.integers, self._exact.maxima, self._exact.decode
        self._flat: torch.Tensor | None = None
        self._averaged: dict[int, torch.Tensor | None] = {}
        self.kept = RuleMemory()
        """Tensors that the rule keeps; the anchors are the weights when the first batch begins."""

    def outside(self, task: Task) -> None:
        """Run a task of the outside program."""
        if task.operation is op.BEGIN:
            self._batch = next(self._batches)
            for key in self.layout.keys:
                if (ANCHOR, key) not in self.kept:
                    self.kept[ANCHOR, key] = self.read_weights(key)
        elif task.operation is op.FORWARD:
            self.take_buffers()
            self._seen[task.key] = self.parameters[task.key].detach().clone().requires_grad_()
        elif task.operation is op.BACKWARD:
            if task.key == 0:  # the last control message was sent, and all weights were read: the last step is over
                self._samples += 0 if self._batch is None else len(self._batch.labels)
                self._compute()
                self.shards = ShardWork(self.layout, self.segments, self.sums, self._weights_of)
                if self.layout.updates is not Updates.OUTSIDE:
                    self.shards.step = ShardedStep(self.optimizer, self.parameters)
            for index in task.parameters:
                self._gradients[index] = _added(self._gradients.get(index), self._fresh.pop(index))
                self._unpacked[index] = len(self.layout.keys_of[index])
        elif task.operation in (op.STEP_LOCAL, op.WAIT_LOCAL):
            self.update_local(task.parameters)
        elif task.operation is STEP:
            self.shards.step = ShardedStep(self.optimizer, self.parameters)
        elif task.operation is op.WAIT and task.parameters:
            self.update(task.parameters)

    # Operations of tasks (`step/replica.py`): gradients

    def agree(self, world: Any) -> None:
        total = sum(world.all_gather_object(self._samples))
        self._weight = self._samples / total if total else 0.0
        self._samples, self._norm = 0, None

    def measure(self, key: int, scaled: bool = True) -> None:
        weight = self._weight if scaled else float(self._weight > 0)
        like, flags = self.read_weights(key), len(self._pieces(key))
        self._sent[key] = like.new_zeros(len(like) + flags)
        self._terms[key] = [(weight, dict(self._gradients))]
        self._exact.measure(key, self._terms[key])

    def pack(self, key: int, scaled: bool = True) -> None:
        weight = self._weight * self._parts(key) if scaled else float(self._weight > 0)
        parts, present = [], []
        self.shards.set_presence(key, self._gradients)
        for index, _, part in self._pieces(key):
            gradient = self._gradients[index]
            present.append(gradient is not None)
            full = torch.zeros_like(self.parameters[index]) if gradient is None else gradient * weight
            parts.append(full.reshape(-1)[part])
            self._unpacked[index] -= 1
            if not self._unpacked[index]:
                del self._gradients[index]
        self._sent[key] = torch.cat([*parts, torch.tensor(present, dtype=parts[0].dtype)])
        if key in self._terms:
            self._exact.pack(key, self._terms[key])
            integers(self.flags(key)).copy_(torch.tensor(present))

    def bucket(self, key: int) -> torch.Tensor:
        return self._sent[key]

    def arrivals(self, key: int) -> tuple[torch.Tensor]:
        return (integers(self._sent[key]) if key in self._terms else self._sent[key],)

    def sums(self, key: int) -> torch.Tensor:
        return self._sent[key][: -len(self._pieces(key))]

    def flags(self, key: int) -> torch.Tensor:
        return self._sent[key][-len(self._pieces(key)) :]

    def set_grads(self, key: int) -> None:
        sums = self.sums(key)
        if self._terms.pop(key, None):
            self.decode(key, 0, len(sums))
        for flag, (index, here, part) in zip(self.flags(key), self._pieces(key), strict=True):
            average = self._averaged.get(index)
            if flag != 0 and average is None:
                average = torch.zeros_like(self.parameters[index])
            if flag != 0 and average is not None:
                average.view(-1)[part] = sums[here]
            self._averaged[index] = None if flag == 0 else average

    def sum_squares(self, world: Any) -> None:
        squares = 0.0
        for index, gradient in sorted(self._averaged.items()):
            if gradient is not None:
                parts = self._parts((self.layout.keys_of[index] or (0,))[0])
                squares += float(torch.linalg.vector_norm(gradient)) ** 2 * parts / self.layout.ranks
        self._norm = sum(world.all_gather_object(squares)) ** 0.5

    def clip(self) -> None:
        self._clip(self._averaged)

    def clip_local(self) -> None:
        self._clip(self._gradients)

    def update(self, parameters: Sequence[int]) -> None:
        self._step({index: self._averaged.pop(index) for index in parameters})

    def update_local(self, parameters: Sequence[int]) -> None:
        self._step({index: self._gradients.pop(index) for index in parameters})

    # Weights and buffers

    def pack_weights(self, key: int, ranks: int) -> None:
        self._sent[key] = self.read_weights(key) / ranks

    def read_weights(self, key: int) -> torch.Tensor:
        return torch.cat([self.parameters[index].detach().reshape(-1)[part] for index, _, part in self._pieces(key)])

    def write_weights(self, key: int, flat: torch.Tensor) -> None:
        with torch.no_grad():
            for index, here, part in self._pieces(key):
                self.parameters[index].view(-1)[part] = flat[here]

    def fill_bucket(self, key: int, flat: torch.Tensor) -> None:
        self._sent[key] = flat.clone()

    def pack_buffers(self) -> None:
        self._flat = torch.cat([buffer.reshape(-1).double() for buffer in self._buffers()])

    def buffers(self) -> torch.Tensor:
        assert self._flat is not None, "buffers are packed before they are sent"
        return self._flat

    def take_buffers(self) -> None:
        """Copy the received floating-point buffers, if any, to the model's."""
        if self._flat is None:
            return
        buffers = self._buffers()
        for buffer, part in zip(buffers, torch.split(self._flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))
        self._flat = None

    # Shards

    def agree_on_step(self, world: Any) -> None:
        if not all(world.all_gather_object(self.shards.step is not None)):
            self.shards.step = None

    def update_shard(self, key: int) -> None:
        self.shards.update(key)

    def unpack_shards(self, key: int) -> None:
        self.write_weights(key, self.sums(key))

    @cached_property
    def segments(self) -> dict[int, tuple[PlacedSegment, ...]]:
        """Segments in this rank's shards of the buckets, by key."""
        segments = {}
        for key in self.layout.keys:
            pieces, group = [*self._pieces(key)], self.layout.group_of(key, self.rank)
            segments[key] = segments_of(pieces, pieces[-1][1].stop, len(group), group.index(self.rank))
        return segments

    def _weights_of(self, segment: Segment) -> torch.Tensor:
        return self.parameters[segment.parameter].detach().view(-1)[segment.first : segment.last]

    # Parts

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]

    def _compute(self) -> None:
        """Compute the gradients of the batch, with the weights that the forward pass has read."""
        self._fresh = dict.fromkeys(range(len(self.parameters)))
        if self._batch is None:
            return
        weights = {self.names[index]: weight for index, weight in self._seen.items()}
        outputs = functional_call(self.model, weights, (self._batch.inputs,))
        order = sorted(self._seen)
        loss = self.loss(outputs, self._batch.labels)
        gradients = torch.autograd.grad(loss, [self._seen[index] for index in order], allow_unused=True)
        self._fresh |= dict(zip(order, gradients, strict=True))

    def _step(self, gradients: dict[int, torch.Tensor | None]) -> None:
        for index, gradient in gradients.items():
            self.parameters[index].grad = gradient
        self.optimizer.step()
        for index in gradients:
            self.parameters[index].grad = None

    def _clip(self, gradients: dict[int, torch.Tensor | None]) -> None:
        assert self.layout.clip is not None, "a program without clip has no clip task"
        # one order of sums on all ranks
        present = [gradient for _, gradient in sorted(gradients.items()) if gradient is not None]
        if not present:
            return  # no rank had a batch
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in present]))
        factor = min(1.0, self.layout.clip / ((float(norm) if self._norm is None else self._norm) + 1e-6))
        for gradient in present:
            gradient.mul_(factor)

    def _parts(self, key: int) -> int:
        """Return the number of parts that the parameters of a bucket are split into over the ranks."""
        return self.layout.ranks // len(self.layout.group_of(key, self.rank))

    def _pieces(self, key: int) -> list[tuple[int, slice, slice]]:
        """Return the parameters in a bucket, each with its place there, and with the elements of it that lie there."""
        bucket, pieces, start = self.layout.bucket(key), list[tuple[int, slice, slice]](), 0
        full = tuple((0, self.parameters[index].numel()) for index in bucket.parameters)
        for index, (first, last) in zip(bucket.parameters, bucket.ranges or full, strict=True):
            pieces.append((index, slice(start, start := start + last - first), slice(first, last)))
        return pieces


def _added(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    return second if first is None else first if second is None else first + second
