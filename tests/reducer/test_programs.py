"""Programs of the coming step, with one rank, or with simulated ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tests.reducer.test_bucket_memory import Allocator

from unisono.placement import place
from unisono.plan.choose import INITIAL_BUCKET_BYTES
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.programs import Programs
from unisono.reducer.tuning import StepTimes
from unisono.rules import BSP, BaseRule, DiLoCo, Exchange, LocalSGD, Sharded

CHAIN = {"overlap": "chain", "exchange": Exchange(bucket_bytes=64)}


class Ranks:
    """World of equal ranks."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank, self.nodes, self.user = size, rank, 1, ""
        self.placement = place([0] * size)
        self.pool = SimpleNamespace(worlds=lambda count: [self] * count)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class One:
    """Programs of one rank of a model with three parameters of 16 elements."""

    def __init__(self, rule: BaseRule, ranks: int = 1, rank: int = 0) -> None:
        parameters = [torch.nn.Parameter(torch.ones(16)) for _ in range(3)]
        self.memory, self.lines = Laid(parameters, Allocator()), list[str]()  # type: ignore[arg-type]
        collectives: Any = Ranks(ranks, rank)
        buffers = Buffers(torch.nn.Identity())
        self.programs = Programs(rule, self.memory, buffers, collectives, StepTimes(3), lambda _: None)
        self.programs.log_with(self.lines.append)


class Laid(BucketMemory):
    """Memory that counts its layouts."""

    count = 0

    def lay_out(self, *given: Any) -> None:
        self.count += 1
        super().lay_out(*given)


def test_a_rule_alone_has_its_first_setting() -> None:
    rank = One(BSP(**CHAIN))
    assert (rank.programs.tuning.setting.overlap, rank.programs.tuning.setting.bucket_bytes) == ("chain", 64)
    assert (rank.programs.tuning.chosen, rank.programs.tuning.choice) == (None, None)
    assert not rank.programs.next_step(deferred=False)
    assert rank.memory.count == 1
    setting = ["chain", 64, (), 2, (), 1]
    state = {"ranks": 1, "order": [2, 1, 0], "setting": setting, "rivals": [], "rounds": [0, 0], "others": []}
    assert rank.programs.tuning.state() == state


def test_buckets_follow_the_order_of_the_first_step() -> None:
    rank = One(BSP(overlap="chain", exchange=Exchange(bucket_bytes=64)), ranks=2)
    assert rank.programs.tuning.state() is None
    rank.programs.next_step(deferred=False)
    rank.programs.tuning.recorded_order = [1, 0, 2]
    assert rank.programs.next_step(deferred=False)
    assert rank.memory.count == 2
    assert rank.memory.buckets[0].parameters == (1,)
    state = rank.programs.tuning.state()
    assert state is not None
    assert state["order"] == [1, 0, 2]


def test_a_run_resumes_with_the_setting_that_it_had() -> None:
    state = {
        **(One(Sharded(**CHAIN)).programs.tuning.state() or {}),
        "rule": "Sharded",
    }  # older runs have the rule's name
    again = One(Sharded(**CHAIN))
    assert again.programs.restore(state)
    assert not again.programs.restore(None)
    assert not again.programs.restore({**state, "ranks": 2})
    assert again.memory.count == 2


def test_a_state_is_continued() -> None:
    rank = One(DiLoCo(every=8, **CHAIN))
    rank.programs.next_step(deferred=False)
    rank.programs.first = 2
    state = rank.programs.rule_state()
    assert (state["cycle"][0], state["first"]) == (8, 2)
    again = One(DiLoCo(every=8, **CHAIN))
    again.programs.resume(6, {**state, "period": 8})  # older checkpoints have it
    assert (again.programs.step, again.programs.first) == (6, 2)
    assert again.programs.rule_state()["kept"].keys() == state["kept"].keys()


def test_another_period_begins_anew() -> None:
    state = {**One(DiLoCo(every=8, **CHAIN)).programs.rule_state(), "first": 2}
    again = One(DiLoCo(every=12, **CHAIN))
    again.programs.resume(6, state)
    assert (again.programs.step, again.programs.first) == (6, 6)


def test_without_a_state_only_a_rule_with_an_anchor_begins_a_period() -> None:
    for rule, first in ((DiLoCo(every=8, **CHAIN), 6), (LocalSGD(every=4, **CHAIN), 0)):
        rank = One(rule)
        rank.programs.resume(6)
        assert (rank.programs.step, rank.programs.first) == (6, first)


def test_too_few_buckets_for_the_fragments_are_reported_by_rank_0() -> None:
    rule = DiLoCo(every=8, fragments=4, overlap="chain", exchange=Exchange(bucket_bytes=INITIAL_BUCKET_BYTES))
    assert One(rule).lines == ["1 of 4 fragments: the weights have 1 buckets; smaller ones give more"]
    assert One(rule, rank=1).lines == []
