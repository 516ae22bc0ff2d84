"""The user's optimizer of one rank, alone in its world."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.reducer.test_bucket_memory import Allocator

from unisono.errors import UsageError
from unisono.optimizers.sharded import Segment
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage
from unisono.reducer.optimizer import ShardedOptimizer
from unisono.reducer.reducer import Reducer
from unisono.reducer.replica import ShardedReplica
from unisono.reducer.scattered_gradient import ScatteredGradient
from unisono.step.layout import Layout
from unisono.step.replica import RuleMemory


class Runner:
    """Runner whose program may wait for the optimizer's step."""

    def __init__(self) -> None:
        self.last: Any = None
        self.awaits_step, self.steps, self.waits = False, 0, list[None]()

    def wait(self) -> None:
        self.waits.append(None)

    def finish_step(self) -> None:
        if not self.awaits_step:
            return
        self.awaits_step = False
        self.steps += 1
        self.last.replica.agree_on_step(SimpleNamespace(allreduce=lambda _: None))
        self.wait()
        if (error := self.last.replica.step_error(("a", "b"))) is not None:
            raise error


class Rank:
    """Rank alone, with two parameters of 4 elements in a bucket each."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        self.memory = BucketMemory(self.parameters, Allocator())  # type: ignore[arg-type]
        self.lay_out((1, 0))
        self.runner = Runner()
        collectives = SimpleNamespace(rank=0, size=1, all_gather_object=lambda value: [value])
        self.programs = SimpleNamespace(
            memory=self.memory,
            buffers=Buffers(torch.nn.Identity()),
            collectives=collectives,
            exact=None,
            virtual=None,
            rule_memory=SimpleNamespace(kept=RuleMemory()),
            layout=lambda: self.layout,
            layer_norms=True,
        )
        self.structure = SimpleNamespace(names=("a", "b"))
        self.sharded: ShardedOptimizer | None = None

    shard: Any = Reducer.shard

    @property
    def optimizer(self) -> ShardedOptimizer:
        assert self.sharded is not None
        return self.sharded

    def lay_out(self, order: tuple[int, ...], largest: int = 16) -> None:
        self.memory.lay_out(order, largest)
        self.layout = Layout(1, 2, self.memory.buckets)

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, lr=1.0, momentum=0.9)

    def begin(self) -> ShardedReplica:
        """Begin a pass in which the first parameter has a gradient, up to the optimizer's step."""
        programs: Any = self.programs
        begun = ShardedReplica(programs, self.layout, ControlMessage(), None)
        begun.gradients.update({0: torch.full((4,), 0.5), 1: None})
        for key in self.layout.keys:
            begun.pack(key)
        self.runner.last, self.runner.awaits_step = SimpleNamespace(replica=begun), True
        return begun


def test_state_is_kept_for_the_segments_of_the_buckets() -> None:
    rank = Rank()
    optimizer = rank.sgd()
    rank.shard(optimizer, own_loop=False)
    assert rank.programs.layer_norms is False
    assert rank.sharded is not None
    sharded = rank.sharded
    assert sorted(segment.parameter for segment in sharded._segments) == [0, 1]
    rank.shard(optimizer, own_loop=False)
    assert rank.sharded is sharded


def test_another_optimizer_takes_the_place_of_the_first() -> None:
    rank = Rank()
    first, second = rank.sgd(), rank.sgd()
    rank.shard(first, own_loop=False)
    rank.shard(second, own_loop=False)
    assert rank.runner.waits == [None]
    assert rank.sharded is not None
    assert rank.sharded.optimizer is second
    with pytest.raises(UsageError, match="shards of its state alone"):
        first.step()
    rank.optimizer.release()
    with pytest.raises(UsageError, match="shards of its state alone"):
        second.step()


def test_shards_follow_the_buckets() -> None:
    rank = Rank()
    rank.shard(rank.sgd(), own_loop=False)
    assert rank.sharded is not None
    before = [segment.parameter for segment in rank.sharded._segments]
    rank.lay_out((0, 1))
    rank.sharded.lay_out()
    assert [segment.parameter for segment in rank.sharded._segments] == before[::-1]


def test_the_program_continues_with_a_step_of_the_users_loop() -> None:
    rank = Rank()
    optimizer = rank.sgd()
    rank.shard(optimizer, own_loop=True)
    begun = rank.begin()
    rank.optimizer.hide_gradients(begun)
    assert isinstance(rank.parameters[0].grad, ScatteredGradient)
    assert rank.parameters[1].grad is None
    optimizer.step()
    assert isinstance(rank.parameters[0].grad, ScatteredGradient)
    assert (rank.runner.steps, rank.runner.waits) == (1, [None])
    for key in rank.layout.keys:
        begun.update_shard(key)
        begun.unpack_shards(key)
    assert rank.parameters[0].tolist() == [0.5] * 4
    assert any(isinstance(key, Segment) for key in optimizer.state)


def test_a_step_that_was_left_out_updates_nothing() -> None:
    rank = Rank()
    rank.shard(rank.sgd(), own_loop=True)
    begun = rank.begin()
    rank.runner.finish_step()
    assert rank.runner.steps == 1
    for key in rank.layout.keys:
        begun.update_shard(key)
        begun.unpack_shards(key)
    assert rank.parameters[0].tolist() == [1.0] * 4
    rank.runner.finish_step()
    assert rank.runner.steps == 1


def test_gradients_are_set_aside_after_the_closure_of_a_step() -> None:
    rank, seen = Rank(), list[Any]()
    optimizer = rank.sgd()
    rank.shard(optimizer, own_loop=True)

    def closure() -> float:
        optimizer.zero_grad()
        rank.optimizer.hide_gradients(rank.begin())
        seen.append(rank.parameters[0].grad)
        return 2.0

    assert optimizer.step(closure) == 2.0
    assert isinstance(seen[0], ScatteredGradient)
    for key in rank.layout.keys:
        rank.runner.last.replica.update_shard(key)
        rank.runner.last.replica.unpack_shards(key)
    assert rank.parameters[0].tolist() == [0.5] * 4


def test_a_failed_pass_leaves_no_placeholder() -> None:
    rank = Rank()
    rank.shard(rank.sgd(), own_loop=True)
    failed = rank.begin()
    failed.discard()
    rank.optimizer.hide_gradients(failed)
    assert rank.parameters[0].grad is None


def removed(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def replaced(parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.ones(4)


def stale(parameter: torch.nn.Parameter) -> None:
    parameter.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed, None),
        (replaced, "parameter a has a gradient in .grad that Sharded has not summed"),
        (stale, r"parameter a has a gradient of an earlier backward pass.*optimizer.zero_grad\(\)"),
    ],
)
def test_changes_of_grad_before_a_step(change: Callable[[torch.nn.Parameter], None], message: str | None) -> None:
    rank = Rank()
    optimizer = rank.sgd()
    rank.shard(optimizer, own_loop=True)
    begun = rank.begin()
    rank.optimizer.hide_gradients(begun)
    change(rank.parameters[0])
    gradient = rank.parameters[0].grad
    if message is None:
        optimizer.step()
    else:
        with pytest.raises(UsageError, match=message):
            optimizer.step()
    assert rank.parameters[0].grad is gradient
    for key in rank.layout.keys:
        begun.update_shard(key)
        begun.unpack_shards(key)
    assert rank.parameters[0].tolist() == [1.0] * 4


def test_a_second_step_and_one_without_a_pass_are_refused() -> None:
    rank = Rank()
    optimizer = rank.sgd()
    rank.shard(optimizer, own_loop=True)
    optimizer.step()  # without a gradient it changes nothing
    rank.optimizer.hide_gradients(rank.begin())
    optimizer.step()
    with pytest.raises(UsageError, match=r"parameter a has a gradient that no backward pass since the last"):
        optimizer.step()
    rank.optimizer.release()


def test_a_hook_that_was_added_later_is_refused() -> None:
    rank = Rank()
    optimizer = rank.sgd()
    rank.shard(optimizer, own_loop=True)
    optimizer.register_step_pre_hook(lambda *_: None)
    rank.optimizer.hide_gradients(rank.begin())
    with pytest.raises(UsageError, match="SGD has hooks on its step"):
        optimizer.step()


@pytest.mark.device
def test_numbers_of_a_parameter_that_are_on_its_device_stay_there(pretend: Callable[[int], torch.device]) -> None:
    """Adam(capturable=True) has its step there; any other has it on the host."""
    rank, device = Rank(), pretend(0)
    rank.shard(rank.sgd(), own_loop=False)
    rank.optimizer._parameters = [parameter.to(device) for parameter in rank.parameters]
    for index, where in enumerate((device, torch.device("cpu"))):
        moments = {"step": torch.ones((), device=where), "exp_avg": torch.ones(4, device=device)}
        rank.optimizer.optimizer.state[Segment(index, 0, 4)] = moments
    (_, first), (_, second) = rank.optimizer._joined_states()
    assert [first[name].device.type for name in ("step", "exp_avg")] == ["pretend"] * 2
    assert [second[name].device.type for name in ("step", "exp_avg")] == ["cpu", "pretend"]
