"""Backward pass of a rule: the replica that the tasks of its programs act on."""

from __future__ import annotations

from typing import NamedTuple

from unisono.asynchronous.exchange import WorkerExchange
from unisono.optimizers.sharded import ShardedStep
from unisono.reducer.backward_pass import BackwardPass, OptimizerStep
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage
from unisono.reducer.exchanging_pass import ExchangingPass
from unisono.reducer.sharded_pass import ShardedPass
from unisono.rules import BaseRule
from unisono.step.layout import Layout, Updates
from unisono.step.replica import RuleMemory
from unisono.step.rule import State


class AppliedBy(NamedTuple):
    """Optimizer's step that applies the gradients of a backward pass, and its place in the program."""

    step: OptimizerStep | ShardedStep | None = None
    updates: Updates = Updates.OUTSIDE

    @property
    def deferred(self) -> bool:
        """True where the backward pass does not wait for its exchanges."""
        return self.step is not None


def pass_of(
    rule: BaseRule,
    parts: tuple[BucketMemory, Buffers, Layout, ControlMessage],
    step: OptimizerStep | ShardedStep | None,
    rank: int,
    kept: RuleMemory,
    exchange: WorkerExchange | None,
) -> BackwardPass:
    """Return a pass of `rule`, whose gradients are applied by `step`, or by the program outside.

    `kept` is what the rule keeps between steps; `exchange` a worker's end of an asynchronous rule's exchanges.
    """
    if rule.traits.state is State.SHARDED:
        begun = ShardedPass(*parts, rank)
        if isinstance(step, ShardedStep):
            begun.step_with(step)
        return begun
    assert not isinstance(step, ShardedStep), "only sharded rules have such steps"
    if exchange is None:
        return BackwardPass(*parts, step, kept)
    return ExchangingPass(*parts, step, exchange)
