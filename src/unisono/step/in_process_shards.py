"""Serial reference of sharded rules: a replica of `in_process.py` whose optimizer has state for its shards alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.optimizers.segments import PlacedSegment, Segment, segments_of
from unisono.optimizers.sharded import ShardedStep
from unisono.step import operations as op
from unisono.step.in_process import Batch, InProcessReplica, Loss
from unisono.step.in_process_world import InProcessWorld
from unisono.step.layout import Layout, Updates
from unisono.step.program import Task
from unisono.step.shard_work import ShardWork
from unisono.step.shards import STEP


class InProcessShardedReplica(InProcessReplica):
    """Model of one rank whose tasks update shards."""

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
        self._work = self._begin()

    def outside(self, task: Task) -> None:
        """Run a task of the outside program."""
        if task.operation is op.BACKWARD and task.key == 0:  # all weights were read: the last step is over
            self._work = self._begin()
            if self.layout.updates is not Updates.OUTSIDE:
                self._work.step = ShardedStep(self.optimizer, self.parameters)
        elif task.operation is STEP:
            self._work.step = ShardedStep(self.optimizer, self.parameters)
        super().outside(task)

    def pack(self, key: int, scaled: bool = True) -> None:
        """Write gradients into a bucket, and record which there are."""
        self._work.set_presence(key, [self._own[number] is not None for number in self.layout.bucket(key).parameters])
        super().pack(key, scaled)

    def presence(self, key: int) -> torch.Tensor:
        """Return a flag for each parameter in a bucket."""
        return self._work.presence(key)

    def agree_on_step(self, world: InProcessWorld) -> None:
        """Make the step where the programs of all ranks make it."""
        if not all(world.all_gather_object(self._work.step is not None)):
            self._work.step = None

    def clip_shards(self, limit: float, world: InProcessWorld) -> None:
        """Scale this rank's gradients so that the norm of all ranks' shards together is at most `limit`."""
        self._work.clip(limit, world)

    def sum_norms(self, world: InProcessWorld) -> None:
        """Sum the squares of the norms of whole layers over the ranks."""
        self._work.sum_norms(world)

    def update_shard(self, key: int) -> None:
        """Replace the gradients in this rank's shard of a bucket by updated weights."""
        self._work.update(key)

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
