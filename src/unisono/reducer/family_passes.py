"""Backward passes by rule: tasks of a sharded rule act on shards, those of a worker exchange buckets with servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from unisono.asynchronous.exchange import WorkerExchange
from unisono.asynchronous.link import MpiLink
from unisono.engine.communicator_pool import ModelCollectives
from unisono.errors import UnisonoError
from unisono.launch import TIMEOUT
from unisono.optimizers.sharded import ShardedStep
from unisono.reducer.backward_pass import BackwardPass, OptimizerStep
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage
from unisono.reducer.scattered_gradient import StepMessage, StepResult, decode, encode
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step.layout import Layout, Updates
from unisono.step.program import RankGroup
from unisono.step.replica import RuleMemory
from unisono.step.rule import RankState
from unisono.step.shard_work import ShardWork
from unisono.world import World


class ShardedPass(BackwardPass):
    """Replica that the tasks of `rules/sharded.py` act on."""

    def __init__(
        self, memory: BucketMemory, buffers: Buffers, layout: Layout, control_message: ControlMessage, rank: int
    ) -> None:
        super().__init__(memory, buffers, layout, control_message)
        segments = {key: memory.segments(key, layout.group_of(key, rank), rank) for key in layout.keys}
        self.shards = ShardWork(layout, segments, self.sums, memory.segment_weights)
        self._rank, self._message = rank, StepMessage()
        self._result: StepResult | None = None  # of all ranks of a loop of their own; None until it is known

    def step_with(self, step: ShardedStep, message: StepMessage | None = None) -> None:
        """Update the shards by this step, in a loop of the program's own if all ranks agree on this message. Without
        one, their weights stay as they are."""
        self.shards.step, self._message = step, message or self._message

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
        parameters, ranks = self.layout.parameters, self.layout.ranks
        total = torch.tensor(encode(self._message, parameters, self._rank, ranks), dtype=torch.float64)
        world.allreduce(total)
        self._result = decode(total.tolist(), parameters, ranks)
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
        bucket_slice = self.memory.bucket_slice(key)
        if self.shards.step is not None:
            self.memory.unpack_weights(bucket_slice)
            return
        parameters = [self.memory.parameters[number] for number in bucket_slice.parameters]
        with _unsafe_preserve_version_counter(tuple(parameters)):
            self.memory.unpack_weights(bucket_slice)


class ExchangingPass(BackwardPass):
    """Replica that the tasks of a worker's step act on (`rules/easgd.py`)."""

    def __init__(
        self,
        memory: BucketMemory,
        buffers: Buffers,
        layout: Layout,
        control_message: ControlMessage,
        optimizer: OptimizerStep | None,
        exchange: WorkerExchange,
    ) -> None:
        super().__init__(memory, buffers, layout, control_message, optimizer)
        self.exchange = exchange
        """This worker's end of its exchanges."""

    def copy_buffers(self) -> None:
        """Copy the model's buffers to the memory they are sent from."""
        self._buffers.pack()


class ServerLinks:
    """Links to all servers, on a communicator of their own. Made by all ranks together, those of servers too."""

    def __init__(self, rule: BaseAsynchronousRule, world: World, collectives: ModelCollectives) -> None:
        self.comm = collectives.call(lambda one: one.dup()).comm
        """Communicator of workers and servers."""
        self.seats = rule.seats(world.size)
        self.timeout = TIMEOUT if world.watch is None else world.watch.timeout
        first = self.seats.workers if rule.server == "rank" else 0
        self.links = [
            MpiLink(self.comm, first + server, worker=True, timeout=self.timeout)
            for server in range(self.seats.servers)
        ]
        """Links by the numbers of the servers."""

    def first_living(self) -> int:
        """Return the first worker that is not known to have died; needs an MPI library that tells."""
        failed = self.comm.Get_failed()
        dead = set(failed.Translate_ranks(None, self.comm.group)) if failed.size else set()
        failed.Free()
        return next(worker for worker in range(self.seats.workers) if worker not in dead)

    def __call__(self, pair: RankGroup) -> MpiLink:
        """Return the link to the server of a pair."""
        return self.links[pair.number]


class AppliedBy(NamedTuple):
    """Optimizer's step that applies the gradients of a backward pass, and its place in the program."""

    step: OptimizerStep | ShardedStep | None = None
    updates: Updates = Updates.OUTSIDE

    @property
    def deferred(self) -> bool:
        """True where the backward pass does not wait for its exchanges."""
        return self.step is not None


def pass_of(
    state: RankState,
    parts: tuple[BucketMemory, Buffers, Layout, ControlMessage],
    step: OptimizerStep | ShardedStep | None,
    rank: int,
    kept: RuleMemory,
    exchange: WorkerExchange | None,
) -> BackwardPass:
    """Return a pass of a rule with this state, whose gradients are applied by `step`, or by the program outside.

    `kept` is what the rule keeps between steps; `exchange` a worker's end of an asynchronous rule's exchanges.
    """
    if state is RankState.SHARDED:
        begun = ShardedPass(*parts, rank)
        if isinstance(step, ShardedStep):
            begun.step_with(step)
        return begun
    assert not isinstance(step, ShardedStep), "only sharded rules have such steps"
    if exchange is None:
        return BackwardPass(*parts, step, kept)
    return ExchangingPass(*parts, step, exchange)
