"""Backward pass of a sharded rule: its tasks sum, update and gather this rank's shards of the buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from unisono.optimizers.sharded import ShardedStep
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage
from unisono.reducer.step_agreement import StepMessage, StepResult, decode, encode
from unisono.step.layout import Layout
from unisono.step.shard_work import ShardWork


class ShardedPass(BackwardPass):
    """Replica that the tasks of `step/shards.py` act on."""

    def __init__(
        self, memory: BucketMemory, buffers: Buffers, layout: Layout, control_message: ControlMessage, rank: int
    ) -> None:
        super().__init__(memory, buffers, layout, control_message)
        segments = {key: memory.segments(key, layout.group_of(key, rank), rank) for key in layout.keys}
        self._work = ShardWork(layout, segments, self.sums, memory.segment_weights)
        self._rank, self._message = rank, StepMessage()
        self.step_result: StepResult | None = None
        """Steps of all ranks of a loop of their own; None until they are known."""

    def step_with(self, step: ShardedStep, message: StepMessage | None = None) -> None:
        """Update the shards by this step, in a loop of the program's own if all ranks agree on this message. Without
        one, their weights stay as they are."""
        self._work.step, self._message = step, message or self._message

    def has_gradient(self, number: int) -> bool:
        """Return True where any rank had a gradient of a parameter. Its bucket has been summed."""
        keys = self.layout.keys_of[number]
        return bool(keys) and self._work.present(keys[0])[number]

    def pack(self, key: int, scaled: bool = True) -> None:
        """Write gradients into a bucket, and record which there are."""
        self._work.set_presence(
            key, [self.gradients[number] is not None for number in self.layout.bucket(key).parameters]
        )
        super().pack(key, scaled)

    def presence(self, key: int) -> torch.Tensor:
        """Return a flag for each parameter in a bucket."""
        return self._work.presence(key)

    def agree_on_step(self, world: Any) -> None:
        """Sum the messages of all ranks. Nothing is updated where not all have made the step."""
        parameters, ranks = self.layout.parameters, self.layout.ranks
        total = torch.tensor(encode(self._message, parameters, self._rank, ranks), dtype=torch.float64)
        world.allreduce(total)
        self.step_result = decode(total.tolist(), parameters, ranks)
        if not self.step_result.is_made():
            self._work.step = None
        self._work.remove(self.step_result.removed)

    def clip_shards(self, limit: float, world: Any) -> None:
        """Scale this rank's gradients so that the norm of all ranks' shards together is at most `limit`."""
        self._work.clip(limit, world)

    def sum_norms(self, world: Any) -> None:
        """Sum the squares of the norms of whole layers over the ranks."""
        self._work.sum_norms(world)

    def update_shard(self, key: int) -> None:
        """Replace the gradients in this rank's shard of a bucket by updated weights."""
        if self.discarded:
            self._work.step = None
        self._work.update(key)

    def unpack_shards(self, key: int) -> None:
        """Copy a bucket of gathered weights to its parameters.

        Where this rank's program has left out the optimizer's step, it may be in the backward pass of the next one,
        which takes no notice of the copy.
        """
        with self.lock:
            if self.discarded:
                return
        bucket_slice = self.memory.bucket_slice(key)
        if self._work.step is not None:
            self.memory.unpack_weights(bucket_slice)
            return
        parameters = [self.memory.parameters[number] for number in bucket_slice.parameters]
        with _unsafe_preserve_version_counter(tuple(parameters)):
            self.memory.unpack_weights(bucket_slice)
