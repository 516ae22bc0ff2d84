"""Kinds of backward passes by rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.optimizers.sharded import ShardedStep
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage
from unisono.reducer.family_passes import AppliedBy, ExchangingPass, ShardedPass, pass_of
from unisono.rules import BSP, EASGD, BaseRule, Sharded
from unisono.step.layout import Bucket, Layout, Updates
from unisono.step.replica import RuleMemory


class Allocator:
    """World that only allocates."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype)


def made(rule: BaseRule, step: Any = None, exchange: Any = None) -> BackwardPass:
    parameters = [torch.nn.Parameter(torch.zeros(4))]
    memory = BucketMemory(parameters, Allocator())  # type: ignore[arg-type]
    buckets = [Bucket(one.nbytes, one.parameters) for one in memory.lay_out((0,), 64).buckets]
    parts = memory, Buffers(torch.nn.Identity()), Layout(2, 1, tuple(buckets)), ControlMessage()
    return pass_of(rule.traits.state, parts, step, 1, KEPT, exchange)


KEPT = RuleMemory()


def test_each_kind_of_rule_has_its_pass() -> None:
    assert type(made(BSP())) is BackwardPass
    assert made(BSP()).kept is KEPT
    assert type(made(Sharded())) is ShardedPass
    assert type(made(EASGD(), exchange=SimpleNamespace())) is ExchangingPass


def test_only_sharded_rules_step_in_shards() -> None:
    step = ShardedStep(torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=1.0), [])
    assert type(made(Sharded(), step)) is ShardedPass
    with pytest.raises(AssertionError, match="only sharded rules"):
        made(BSP(), step)


def test_a_pass_whose_gradients_a_step_applies_is_deferred() -> None:
    assert not AppliedBy().deferred
    assert AppliedBy().updates is Updates.OUTSIDE
    assert AppliedBy(SimpleNamespace(update=list), Updates.PARTS).deferred
