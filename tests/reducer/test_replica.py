"""Work of the tasks of a pass, and the kinds of replicas by rule."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.reducer.test_bucket_memory import Allocator
from torch import nn

from unisono.errors import UsageError
from unisono.optimizers.sharded import ShardedStep
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage, encode
from unisono.reducer.reducer import Reducer
from unisono.reducer.replica import ModelReplica, ShardedReplica
from unisono.rules import BSP, EASGD, BaseRule, Sharded
from unisono.step.layout import Layout
from unisono.step.replica import RuleMemory


class Alone:
    """Rank 0 of two; the other rank contributes `other`."""

    rank, size = 0, 2

    def __init__(self, other: ControlMessage) -> None:
        self.other = other

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(torch.tensor(encode(self.other, 1, 2), dtype=tensor.dtype))


def programs_of(memory: BucketMemory, rank: int = 0) -> Any:
    """Return what replicas need of programs."""
    return SimpleNamespace(
        memory=memory,
        buffers=Buffers(nn.Identity()),
        collectives=SimpleNamespace(rank=rank),
        exact=None,
        virtual=None,
        rule_memory=SimpleNamespace(kept=RuleMemory()),
    )


def begin(
    lengths: Sequence[int], order: Sequence[int], largest: int = 64, message: ControlMessage | None = None
) -> ModelReplica:
    """Return the replica of parameters of these lengths; 64 bytes are a bucket for each that has 16 elements."""
    memory = BucketMemory([nn.Parameter(torch.zeros(length)) for length in lengths], Allocator())
    memory.lay_out(order, largest)
    layout = Layout(2, len(lengths), memory.buckets)
    return ModelReplica(programs_of(memory), layout, message or ControlMessage(1.0))


def test_a_gradient_is_released_when_all_its_parts_are_packed() -> None:
    begun = begin([48], [0])
    begun.gradients[0] = torch.ones(48)
    for key in (1, 2):
        begun.pack(key)
        assert begun.gradients[0] is not None
    begun.pack(3)
    assert begun.gradients == {0: None}
    assert [begun.bucket(key)[:16].tolist() for key in begun.layout.keys] == [[1.0] * 16] * 3


def test_the_weight_comes_from_all_control_messages() -> None:
    begun = begin([1], [0], message=ControlMessage(2.0))
    assert begun.message.result is None
    begun.agree(Alone(ControlMessage(6.0)))  # type: ignore[arg-type]
    assert (begun.weight, begun.discarded) == (0.25, False)
    assert begun.message.result is not None
    assert begun.message.result.samples == 8
    begun.agree(Alone(ControlMessage()))  # type: ignore[arg-type]
    assert begun.discarded


def test_no_gradient_without_one_on_any_rank_and_none_of_a_failed_pass() -> None:
    begun = begin([1, 1], [0, 1], 1 << 20)
    begun.gradients.update({0: torch.ones(1), 1: None})
    begun.pack(1)
    begun.set_grads(1)
    first, second = begun.memory.parameters
    assert first.grad is not None
    assert second.grad is None
    first.grad = None
    begun.discard()
    begun.set_grads(1)
    assert first.grad is None


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_a_split_parameter_gets_its_gradient_with_its_last_part(order: tuple[int, ...]) -> None:
    """On several communicators the part that has the flag may come first: the others are still being written."""
    begun = begin([48], [0])
    begun.gradients[0] = torch.ones(48)
    for key in order:
        assert begun.memory.parameters[0].grad is None
        begun.pack(key)
        begun.set_grads(key)
    assert begun.memory.parameters[0].grad is not None


class Made:
    """Reducer of a rule, as far as it makes replicas."""

    make: Any = Reducer._replica_of

    def __init__(self, rule: BaseRule, step: Any = None, exchange: Any = None, sharded: Any = True) -> None:
        memory = BucketMemory([nn.Parameter(torch.zeros(4))], Allocator())
        memory.lay_out((0,), 64)
        self.rule, self.traits, self.programs = rule, rule.traits, programs_of(memory, 1)
        self.exchange, self.sharded, self._step = exchange, sharded, step
        self.replica: ModelReplica = self.make(Layout(2, 1, memory.buckets), ControlMessage())


def test_each_kind_of_rule_has_its_replica() -> None:
    made = Made(BSP())
    assert type(made.replica) is ModelReplica
    assert made.replica.kept is made.programs.rule_memory.kept
    assert type(Made(Sharded()).replica) is ShardedReplica
    exchange = SimpleNamespace(announce=None, replied=None)
    assert Made(EASGD(), exchange=exchange).replica.exchange is exchange


def test_only_sharded_rules_step_in_shards() -> None:
    step = ShardedStep(torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=1.0), [])
    replica = Made(Sharded(), step).replica
    assert isinstance(replica, ShardedReplica)
    assert replica.shards.step is step
    with pytest.raises(AssertionError, match="only sharded rules"):
        Made(BSP(), step)
    with pytest.raises(UsageError, match="Sharded needs the optimizer"):
        Made(Sharded(), sharded=None)
