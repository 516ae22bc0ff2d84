"""Waits of one rank, with a player that records them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.engine import OperationSpan
from unisono.errors import OperationError, UsageError
from unisono.reducer.buffers import Buffers
from unisono.reducer.pending_work import PendingWork
from unisono.reducer.step_times import StepTimes
from unisono.step.build import BUFFERS
from unisono.step.elastic import header
from unisono.step.program import Value, weights


class Recorder:
    """Player whose tasks end when somebody waits for them; `pending` are the weights that are not up to date."""

    def __init__(self) -> None:
        self.waits: list[Any] = []
        self.pending: set[Value] = set()
        self.failure: OperationError | None = None

    def wait(self, *values: Value) -> None:
        self.waits.append(values)
        if self.failure is not None:
            raise self.failure

    def wait_for(self, value: Value) -> bool:
        there = value in self.pending
        self.pending.discard(value)
        return there

    def wait_over_steps(self) -> None:
        self.waits.append("over steps")


class Rank:
    """One rank with two parameters and a buffer."""

    def __init__(self, rank: int = 1) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        self.model = torch.nn.BatchNorm1d(2, affine=False)
        self.buffers = Buffers(self.model)
        self.player, self.times = Recorder(), StepTimes(2)
        self.runner, self.control = SimpleNamespace(current=None, last=None), SimpleNamespace(check=self._check)
        self.error: UsageError | None = None
        self.spans: list[OperationSpan] = []
        programs = SimpleNamespace(player=self.player, communicators=2)
        rooms: tuple[Any, ...] = (programs, self.runner, self.control)
        self.pending = PendingWork(self.parameters, self.buffers, *rooms, self.times, self.spans.append, rank)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def receive(self, mean: float) -> SimpleNamespace:
        """Begin a pass in which rank 0's buffers arrive."""
        other = torch.nn.BatchNorm1d(2, affine=False)
        torch.nn.init.constant_(other.running_mean, mean)  # type: ignore[arg-type]
        sent = Buffers(other)
        sent.pack()
        self.buffers.flat.copy_(sent.flat)
        self.runner.last = SimpleNamespace(buffers_pending=True, discarded=False)
        return self.runner.last


def test_a_wait_is_for_all_tasks_then_for_buffers_then_for_the_control_message() -> None:
    rank = Rank()
    rank.receive(3.0)
    rank.error = UsageError("rank 1 has not given the number of samples")
    with pytest.raises(UsageError, match="rank 1"):
        rank.pending.wait()
    assert rank.player.waits == [(), (BUFFERS,)]
    assert rank.model.running_mean.tolist() == [3.0, 3.0]  # type: ignore[union-attr]
    assert rank.times.waiting > 0


def test_buffers_are_copied_once_and_not_on_rank_0() -> None:
    for number in (0, 1):
        rank = Rank(number)
        last = rank.receive(3.0)
        rank.pending.wait_for_buffers()
        rank.pending.wait_for_buffers()
        assert rank.player.waits == [(BUFFERS,)]
        assert not last.buffers_pending
        assert rank.model.running_mean.tolist() == [3.0 * number] * 2  # type: ignore[union-attr]


def test_buffers_are_not_waited_for_while_a_pass_runs_nor_taken_from_one_that_failed() -> None:
    rank = Rank()
    last = rank.receive(3.0)
    rank.runner.current = last
    rank.pending.wait_for_buffers()
    assert rank.player.waits == []
    rank.runner.current, last.discarded = None, True
    rank.pending.wait_for_buffers()
    assert rank.model.running_mean.tolist() == [0.0, 0.0]  # type: ignore[union-attr]


def test_a_parameter_is_waited_for_when_it_is_read() -> None:
    rank = Rank()
    rank.player.pending = {weights(0), weights(1)}
    rank.pending.wait_for(rank.parameters[1])
    assert rank.player.pending == {weights(0)}
    assert [one.name for one in rank.spans] == ["wait for weights"]
    rank.pending.wait_for(rank.parameters[1])
    rank.pending.wait_for(torch.zeros(2))  # not one of the model's
    rank.runner.current = SimpleNamespace()
    rank.pending.wait_for(rank.parameters[0])  # a backward pass reads weights that are up to date
    assert rank.player.pending == {weights(0)}
    assert len(rank.spans) == 1


def test_exchanges_beside_later_steps_are_waited_for_at_the_end() -> None:
    rank = Rank()
    rank.pending.wait_for_all()
    assert rank.player.waits == [(), "over steps"]
    rank.pending.wait_for_replies()
    assert rank.player.waits[-1] == (header(0), header(1))


def test_an_error_at_the_end_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank()
    rank.player.failure = OperationError("allreduce 1 has failed")
    rank.pending.finish()
    assert capsys.readouterr().err == "unisono: the last step has failed: allreduce 1 has failed\n"
