"""Serial reference of every rule, a user's own included: its programs run on real tensors, all ranks in one process.

    rank 0's model ┐
    rank 1's model ┼─ one loop: a task of one rank, a collective of all, ... in any order that the programs allow
    rank 2's model ┘

Nothing here is fast. Each rank has its own replica, whose gradients, buckets and updates are made in the plainest way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.func import functional_call

from unisono.optimizers.segments import PlacedSegment, Segment, segments_of
from unisono.optimizers.sharded import ShardedStep
from unisono.step import operations as op
from unisono.step.clock import Clock, TaskSpan
from unisono.step.costs import Costs
from unisono.step.in_process_world import InProcessWorld, carry_out
from unisono.step.layout import Layout, Updates
from unisono.step.matching import Member, play_in_random_order
from unisono.step.program import Step, StepProgram, Task
from unisono.step.replica import ANCHOR, RuleMemory
from unisono.step.rule import BaseRule
from unisono.step.shard_work import ShardWork
from unisono.step.shards import STEP

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Batch(NamedTuple):
    """Batch that a rank trains on in a step. A rank without a batch has None in its place."""

    inputs: torch.Tensor
    labels: torch.Tensor


class InProcessReplica:
    """Model of one rank, trained by tasks in the plainest way."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        layout: Layout,
        batches: Sequence[Batch | None],
    ) -> None:
        self.model, self.optimizer, self.loss, self.layout = model, optimizer, loss, layout
        self._batches = iter(batches)
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [one for _, one in named]
        self._batch: Batch | None = None
        self._samples = 0
        self._weight, self._rank = 0.0, 0
        self._norm: float | None = None
        self._seen: dict[int, torch.Tensor] = {}
        self._fresh: dict[int, torch.Tensor | None] = {}
        self._own: dict[int, torch.Tensor | None] = {}
        self._unpacked: dict[int, int] = {}
        self._sent: dict[int, torch.Tensor] = {}
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
                    self.kept.put(ANCHOR, key, self.read_weights(key))
        elif task.operation is op.FORWARD:
            self.take_buffers()
            self._seen[task.key] = self.parameters[task.key].detach().clone().requires_grad_()
        elif task.operation is op.BACKWARD:
            if task.key == 0:  # the last control message was sent: it must precede the next pass
                self._samples += 0 if self._batch is None else len(self._batch.labels)
                self._compute()
            for number in task.parameters:
                self._own[number] = _added(self._own.get(number), self._fresh.pop(number))
                self._unpacked[number] = len(self.layout.keys_of[number])
        elif task.operation is op.STEP_LOCAL:
            self.update_local(task.parameters)
        elif task.operation is op.WAIT and self.layout.updates is Updates.OUTSIDE:
            self.update(task.parameters)

    # Operations of tasks (`replica.py`)

    def agree(self, world: InProcessWorld) -> None:
        total = sum(world.all_gather_object(self._samples))
        self._weight = self._samples / total if total else 0.0
        self._samples, self._rank, self._norm = 0, world.rank, None

    def pack(self, key: int, scaled: bool = True) -> None:
        weight = self._weight * self._parts(key) if scaled else float(self._weight > 0)
        parts, there = [], []
        for number, first, last in self._ranges(key):
            own = self._own[number]
            there.append(float(own is not None))
            whole = torch.zeros_like(self.parameters[number]) if own is None else own * weight
            parts.append(whole.reshape(-1)[first:last])
            self._unpacked[number] -= 1
            if not self._unpacked[number]:
                del self._own[number]
        self._sent[key] = torch.cat([*parts, torch.tensor(there, dtype=parts[0].dtype)])

    def bucket(self, key: int) -> torch.Tensor:
        return self._sent[key]

    def sums(self, key: int) -> torch.Tensor:
        return self._sent[key][: -len(self._ranges(key))]

    def flags(self, key: int) -> torch.Tensor:
        return self._sent[key][-len(self._ranges(key)) :]

    def set_grads(self, key: int) -> None:
        ranges = self._ranges(key)
        at = 0
        for place, (number, first, last) in enumerate(ranges):
            if self._sent[key][place - len(ranges)] == 0:
                self._averaged[number] = None
            else:
                whole = self._averaged.get(number)
                if whole is None:
                    whole = self._averaged[number] = torch.zeros_like(self.parameters[number])
                whole.view(-1)[first:last] = self._sent[key][at : at + last - first]
            at += last - first

    def sum_squares(self, world: InProcessWorld) -> None:
        found = [
            float(torch.linalg.vector_norm(one)) ** 2
            * self._parts((self.layout.keys_of[number] or (0,))[0])
            / self.layout.ranks
            for number, one in sorted(self._averaged.items())
            if one is not None
        ]
        self._norm = sum(world.all_gather_object(sum(found))) ** 0.5

    def clip(self) -> None:
        self._clip(self._averaged)

    def clip_local(self) -> None:
        self._clip(self._own)

    def update(self, parameters: Sequence[int]) -> None:
        self._step({number: self._averaged.pop(number) for number in parameters})

    def update_local(self, parameters: Sequence[int]) -> None:
        self._step({number: self._own.pop(number) for number in parameters})

    def pack_weights(self, key: int) -> None:
        self._sent[key] = self.read_weights(key) / self.layout.ranks

    def copy_weights(self, key: int) -> None:
        """Write weights into a bucket."""
        self._sent[key] = self.read_weights(key)

    def unpack_weights(self, key: int) -> None:
        self.write_weights(key, self._sent[key])

    def read_weights(self, key: int) -> torch.Tensor:
        return torch.cat([self.parameters[number].detach().reshape(-1)[a:b] for number, a, b in self._ranges(key)])

    def write_weights(self, key: int, flat: torch.Tensor) -> None:
        at = 0
        with torch.no_grad():
            for number, first, last in self._ranges(key):
                self.parameters[number].view(-1)[first:last] = flat[at : at + last - first]
                at += last - first

    def fill_bucket(self, key: int, flat: torch.Tensor) -> None:
        self._sent[key] = flat.clone()

    def pack_buffers(self) -> None:
        self._flat = torch.cat([one.reshape(-1).double() for one in self._buffers()])

    def buffers(self) -> torch.Tensor:
        assert self._flat is not None, "buffers are packed before they are sent"
        return self._flat

    def take_buffers(self) -> None:
        """Copy the received floating-point buffers, if any, to the model's."""
        if self._flat is None:
            return
        at = 0
        for one in self._buffers():
            one.copy_(self._flat[at : at + one.numel()].view(one.shape))
            at += one.numel()
        self._flat = None

    def _buffers(self) -> list[torch.Tensor]:
        return [one for one in self.model.buffers() if one.is_floating_point()]

    def _compute(self) -> None:
        """Compute the gradients of the batch, with the weights that the forward pass has read."""
        self._fresh = dict.fromkeys(range(len(self.parameters)))
        if self._batch is None:
            return
        weights = {self.names[number]: one for number, one in self._seen.items()}
        found = functional_call(self.model, weights, (self._batch.inputs,))
        order = sorted(self._seen)
        loss = self.loss(found, self._batch.labels)
        gradients = torch.autograd.grad(loss, [self._seen[number] for number in order], allow_unused=True)
        self._fresh |= dict(zip(order, gradients, strict=True))

    def _step(self, gradients: dict[int, torch.Tensor | None]) -> None:
        for number, gradient in gradients.items():
            self.parameters[number].grad = gradient
        self.optimizer.step()
        for number in gradients:
            self.parameters[number].grad = None

    def _clip(self, gradients: dict[int, torch.Tensor | None]) -> None:
        assert self.layout.clip is not None, "a program without clip has no clip task"
        found = [one for _, one in sorted(gradients.items()) if one is not None]  # one order of sums on all ranks
        if not found:
            return  # no rank had a batch
        own = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in found]))
        norm = float(own) if self._norm is None else self._norm
        factor = min(1.0, self.layout.clip / (norm + 1e-6))
        for one in found:
            one.mul_(factor)

    def _parts(self, key: int) -> int:
        """Return the number of parts that the parameters of a bucket are split into over the ranks."""
        return self.layout.ranks // len(self.layout.group_of(key, self._rank))

    def _ranges(self, key: int) -> list[tuple[int, int, int]]:
        """Return the parameters in a bucket, each with its first and last element (exclusive) there."""
        bucket = self.layout.bucket(key)
        whole = tuple((0, self.parameters[number].numel()) for number in bucket.parameters)
        return [
            (number, first, last)
            for number, (first, last) in zip(bucket.parameters, bucket.ranges or whole, strict=True)
        ]


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other


class InProcessShardedReplica(InProcessReplica):
    """Model of one rank whose tasks update shards, and whose optimizer has state for these alone."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        layout: Layout,
        batches: Sequence[Batch | None],
        rank: int,
    ) -> None:
        super().__init__(model, optimizer, loss, layout, batches)
        self.segments: dict[int, tuple[PlacedSegment, ...]] = {
            key: self._segments(key, rank) for key in self.layout.keys
        }
        """Segments of this rank, by key."""
        self.shards = self._begin()
        """Work on them in this step."""

    def outside(self, task: Task) -> None:
        """Run a task of the outside program."""
        if task.operation is op.BACKWARD and task.key == 0:  # all weights were read: the last step is over
            self.shards = self._begin()
            if self.layout.updates is not Updates.OUTSIDE:
                self.shards.step = ShardedStep(self.optimizer, self.parameters)
        elif task.operation is STEP:
            self.shards.step = ShardedStep(self.optimizer, self.parameters)
        super().outside(task)

    def pack(self, key: int, scaled: bool = True) -> None:
        self.shards.set_presence(key, [self._own[number] is not None for number in self.layout.bucket(key).parameters])
        super().pack(key, scaled)

    def agree_on_step(self, world: InProcessWorld) -> None:
        """Make the step where the programs of all ranks make it."""
        if not all(world.all_gather_object(self.shards.step is not None)):
            self.shards.step = None

    def update_shard(self, key: int) -> None:
        """Replace the gradients in this rank's shard of a bucket by updated weights."""
        self.shards.update(key)

    def unpack_shards(self, key: int) -> None:
        """Copy a bucket of gathered weights to its parameters."""
        self.write_weights(key, self.sums(key))

    def _begin(self) -> ShardWork:
        return ShardWork(self.layout, self.segments, self.sums, self._weights_of)

    def _weights_of(self, segment: Segment) -> torch.Tensor:
        return self.parameters[segment.number].detach().view(-1)[segment.first : segment.last]

    def _segments(self, key: int, rank: int) -> tuple[PlacedSegment, ...]:
        at, ranges = 0, []
        for number, first, last in self._ranges(key):
            ranges.append((number, at, at + last - first, first))
            at += last - first
        group = self.layout.group_of(key, rank)
        return segments_of(ranges, at, len(group), group.index(rank))


def play_in_process(
    rule: BaseRule,
    replicas: Sequence[InProcessReplica],
    events: Sequence[Step],
    seed: int = 0,
    costs: Costs | None = None,
) -> list[TaskSpan]:
    """Train replicas, one for each rank, by a rule. The order is a random one that the programs allow, chosen by
    `seed`. With `costs`, tasks run in the order of the clock, and their spans are returned."""
    layout = replicas[0].layout
    return play_programs(rule.programs(layout, events), replicas, rule.threads(), seed, costs)


def play_programs(
    programs: Sequence[StepProgram],
    replicas: Sequence[Any],
    threads: Mapping[str, int],
    seed: int = 0,
    costs: Costs | None = None,
) -> list[TaskSpan]:
    """Play one program for each replica, as `play_in_process` does."""

    def carry(together: Sequence[Member]) -> None:
        carry_out(replicas, together)

    if costs is None:
        play_in_random_order(programs, carry, seed)
        return []
    clock = Clock(dict(enumerate(programs)), threads, lambda _, task: task.operation.price(task, costs), carry)
    return clock.run()
