"""Rule of the coming step, with one rank, or with simulated ones."""

from __future__ import annotations

from typing import Any

import torch

from unisono.plan.choose import INITIAL_BUCKET_BYTES
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.rule_choice import RuleChoice
from unisono.reducer.step_times import StepTimes
from unisono.rules import BSP, BaseRule, DiLoCo, Exchange, LocalSGD, Sharded

CHAIN = {"overlap": "chain", "exchange": Exchange(bucket_bytes=64)}


class Allocator:
    """World that only allocates."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype)


class Ranks:
    """World of equal ranks."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank, self.nodes = size, rank, 1

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Programs:
    """Programs of a model, which record what is adopted."""

    def __init__(self, memory: BucketMemory) -> None:
        self._memory = memory
        self.number = self.first = 0
        self.layouts = 0

    def adopt(self, setting: Any, order: list[int]) -> None:
        self.layouts += 1
        self._memory.lay_out(order, setting.bucket_bytes, setting.sequence, setting.end_ratio)


class Choice:
    """Choice of one rank of a model with three parameters of 16 elements."""

    def __init__(self, rule: BaseRule, ranks: int = 1, rank: int = 0) -> None:
        parameters = [torch.nn.Parameter(torch.ones(16)) for _ in range(3)]
        self.memory = BucketMemory(parameters, Allocator())  # type: ignore[arg-type]
        self.programs, self.waits, self.lines = Programs(self.memory), list[None](), list[str]()
        rooms: tuple[Any, ...] = (self.memory, Ranks(ranks, rank), StepTimes(3), self.programs)
        self.choice = RuleChoice(rule, *rooms, lambda: self.waits.append(None))
        self.choice.log_with(self.lines.append)


def test_a_rule_alone_has_its_first_setting() -> None:
    one = Choice(BSP(**CHAIN))
    assert (one.choice.setting.overlap, one.choice.setting.bucket_bytes) == ("chain", 64)
    assert (one.choice.chosen, one.choice.predicted) == (None, None)
    assert not one.choice.next_step(deferred=False)
    assert one.programs.layouts == 1
    setting = ["chain", 64, (), 2, (), 1]
    assert one.choice.state() == {"ranks": 1, "order": [2, 1, 0], "setting": setting}


def test_buckets_follow_the_order_of_the_first_step() -> None:
    one = Choice(BSP(overlap="chain", exchange=Exchange(bucket_bytes=64)), ranks=2)
    assert one.choice.state() is None
    one.choice.next_step(deferred=False)
    one.choice.record_order([1, 0, 2])
    assert one.choice.next_step(deferred=False)
    assert one.programs.layouts == 2
    assert one.memory.layout.buckets[0].parameters == (1,)
    state = one.choice.state()
    assert state is not None
    assert state["order"] == [1, 0, 2]


def test_a_run_resumes_with_the_setting_that_it_had() -> None:
    state = {**(Choice(Sharded(**CHAIN)).choice.state() or {}), "rule": "Sharded"}  # older runs have the rule's name
    again = Choice(Sharded(**CHAIN))
    assert again.choice.restore(state)
    assert not again.choice.restore(None)
    assert not again.choice.restore({**state, "ranks": 2})
    assert again.programs.layouts == 2


def test_a_state_waits_for_exchanges_and_is_continued() -> None:
    one = Choice(DiLoCo(every=8, **CHAIN))
    one.choice.next_step(deferred=False)
    one.programs.first = 2
    state = one.choice.rule_state()
    assert one.waits == [None]
    assert (state["cycle"][0], state["first"]) == (8, 2)
    again = Choice(DiLoCo(every=8, **CHAIN))
    again.choice.resume(6, {**state, "period": 8})  # older checkpoints have it
    assert (again.programs.number, again.programs.first) == (6, 2)
    assert again.choice.rule_state()["kept"].keys() == state["kept"].keys()


def test_another_period_begins_anew() -> None:
    state = {**Choice(DiLoCo(every=8, **CHAIN)).choice.rule_state(), "first": 2}
    again = Choice(DiLoCo(every=12, **CHAIN))
    again.choice.resume(6, state)
    assert (again.programs.number, again.programs.first) == (6, 6)


def test_without_a_state_only_a_rule_with_an_anchor_begins_a_period() -> None:
    for rule, first in ((DiLoCo(every=8, **CHAIN), 6), (LocalSGD(every=4, **CHAIN), 0)):
        one = Choice(rule)
        one.choice.resume(6)
        assert (one.programs.number, one.programs.first) == (6, first)


def test_too_few_buckets_for_the_fragments_are_reported_by_rank_0() -> None:
    rule = DiLoCo(every=8, fragments=4, overlap="chain", exchange=Exchange(bucket_bytes=INITIAL_BUCKET_BYTES))
    assert Choice(rule).lines == ["1 of 4 fragments: the weights have 1 buckets; smaller ones give more"]
    assert Choice(rule, rank=1).lines == []
