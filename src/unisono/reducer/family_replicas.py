"""Replicas by rule: tasks of a sharded rule act on shards, those of a worker exchange buckets with servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from unisono.asynchronous.exchange import WorkerExchange
from unisono.errors import UnisonoError
from unisono.optimizers.sharded import ShardedStep
from unisono.reducer.backward_pass import ModelReplica
from unisono.reducer.scattered_gradient import GradientUse, StepResult, step_numbers, step_result
from unisono.step.shard_work import ShardWork


class ShardedReplica(ModelReplica):
    """Replica that the tasks of `rules/sharded.py` act on. They update by `step`; None: the program has made none."""

    def __init__(self, rank: int, step: ShardedStep | None, *parts: Any) -> None:
        super().__init__(*parts)
        memory, layout = self.memory, self.layout
        segments = {key: memory.segments(key, layout.group_of(key, rank), rank) for key in layout.keys}
        beside = partial(memory.incoming, marked=True)
        self.shards = ShardWork(layout, segments, self.sums, memory.segment_weights, beside)
        self.shards.step, self._rank = step, rank
        self.uses: Mapping[int, GradientUse] | None = None
        """Changes of gradients by the program before its step; None where it has left the step out."""
        self._result: StepResult | None = None  # of all ranks of a loop of their own; None until it is known

    def has_gradient(self, number: int) -> bool:
        """Return True where any rank had a gradient of a parameter. Its bucket has been summed."""
        keys = self.layout.keys_of[number]
        return bool(keys) and self.shards.present(keys[0])[number]

    def step_error(self, names: Sequence[str]) -> UnisonoError | None:
        """Return the error of a step that only some ranks have made, or of other gradients than those summed."""
        return None if self._result is None else self._result.error(names)

    def pack(self, key: int, scaled: bool = True) -> None:
        """Write gradients into a bucket, and record which there are."""
        self.shards.set_presence(
            key, [self.gradients[number] is not None for number in self.layout.bucket(key).parameters]
        )
        super().pack(key, scaled)

    def agree_on_step(self, world: Any) -> None:
        """Sum the messages of all ranks. Nothing is updated where not all have made the step."""
        own = step_numbers(self.uses, self.layout.parameters, self._rank, self.layout.ranks)
        total = torch.tensor(own, dtype=torch.float64)
        world.allreduce(total)
        self._result = step_result(total.tolist(), self.layout.parameters, self.layout.ranks)
        if not self._result.is_made():
            self.shards.step = None
        self.shards.remove(self._result.removed)

    def update_shard(self, key: int) -> None:
        """Replace the gradients in this rank's shard of a bucket by updated weights."""
        if self.discarded:
            self.shards.step = None
        self.shards.update(key)

    def unpack_shards(self, key: int) -> None:
        """Copy a bucket of gathered weights to its parameters.

        Where this rank's program has left out the optimizer's step, it may be in the backward pass of the next one,
        which takes no notice of the copy.
        """
        with self.lock:
            if self.discarded:
                return
        if self.shards.step is not None:
            self.unpack_weights(key)
            return
        parameters = tuple(self.memory.parameters[number] for number in self.layout.bucket(key).parameters)
        with _unsafe_preserve_version_counter(parameters):
            self.unpack_weights(key)


class ExchangingReplica(ModelReplica):
    """Replica that the tasks of a worker's step act on (`rules/easgd.py`)."""

    def __init__(self, exchange: WorkerExchange, *parts: Any) -> None:
        super().__init__(*parts)
        self.exchange = exchange
        """This worker's end of its exchanges."""

    def copy_buffers(self) -> None:
        """Copy the model's buffers to the memory they are sent from."""
        with self.memory.incoming(marked=True):
            self._buffers.pack()
