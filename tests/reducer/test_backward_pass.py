"""Backward passes, with programs whose tasks are recorded instead of carried out; waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread, current_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.reducer.test_bucket_memory import Allocator

from unisono.engine import OperationSpan
from unisono.errors import OperationError, UsageError
from unisono.reducer.accumulation import Accumulation
from unisono.reducer.backward_pass import BackwardPass, PassRunner
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage
from unisono.reducer.hooks import BackwardEndCallback
from unisono.reducer.replica import ModelReplica
from unisono.reducer.scattered_gradient import ScatteredGradient
from unisono.reducer.tuning import StepTimes
from unisono.rules import BSP, BaseRule, LocalSGD
from unisono.rules.easgd import header
from unisono.step.build import BUFFERS
from unisono.step.layout import Layout, Updates
from unisono.step.operations import PACK, UPDATE_LOCAL
from unisono.step.play import PreparedTask
from unisono.step.program import UPDATE, Operation, Step, Task, Value, weights
from unisono.step.replica import RuleMemory

FIRST = ["agree 0", "pack 1", "allreduce 1", "set_grads 1"]
SECOND = ["pack 2", "allreduce 2", "set_grads 2"]


class Threads:
    """Engine with a thread for each action."""

    def push(self, action: Callable[[], None], *_: Any, **__: Any) -> Any:
        thread = Thread(target=action, name="computing")
        thread.start()
        return SimpleNamespace(wait=thread.join)


class Recorder:
    """Player that records the tasks, and the threads that play them."""

    engine = Threads()

    def __init__(self) -> None:
        self.played: list[str] = []
        self.threads: set[str] = set()

    def wait(self) -> None:
        """Wait for nothing: tasks are only recorded."""

    def play(self, ready: PreparedTask, _: object) -> None:
        self.played.append(str(ready.task))
        self.threads.add(current_thread().name)


def programs_of(
    player: object,
    memory: Any,
    buffers: Buffers,
    rule: BaseRule,
    observe: Callable[[OperationSpan], None] = lambda _: None,
    rank: int = 0,
    by_main: bool = False,
) -> Any:
    """Return what passes need of programs."""
    return SimpleNamespace(
        player=player,
        memory=memory,
        buffers=buffers,
        exact=None,
        virtual=None,
        rule_memory=SimpleNamespace(kept=RuleMemory()),
        times=StepTimes(len(memory.parameters)),
        observe=observe,
        collectives=SimpleNamespace(rank=rank),
        communicators=2,
        overlap=SimpleNamespace(by_main=by_main),
        traits=rule.traits,
    )


class Passes:
    """Passes over parameters in buckets; unless given, four in two buckets, of 3 and 2, and of 1 and 0."""

    def __init__(
        self,
        rule: BaseRule | None = None,
        by_main: bool = False,
        lengths: Sequence[int] = (16,) * 4,
        order: Sequence[int] = (3, 2, 1, 0),
        largest: int = 160,
    ) -> None:
        self.rule = BSP(overlap="chain") if rule is None else rule
        self.parameters = [torch.nn.Parameter(torch.zeros(length)) for length in lengths]
        self.memory = BucketMemory(self.parameters, Allocator())  # type: ignore[arg-type]
        self.memory.lay_out(order, largest)
        self.layout = Layout(2, len(lengths), self.memory.buckets, updates=Updates.OUTSIDE)
        self.player = Recorder()
        buffers = Buffers(torch.nn.Identity())
        self.programs = programs_of(self.player, self.memory, buffers, self.rule, by_main=by_main)
        control: Any = SimpleNamespace(check=lambda: None)
        self.runner = PassRunner(self.programs, control)

    def begin(self, message: ControlMessage | None = None, expected_weight: float | None = None) -> BackwardPass:
        message = replace(message or ControlMessage(1.0), expected_weight=expected_weight)
        replica = ModelReplica(self.programs, self.layout, message)
        tasks = self.rule(Step(0), 0, self.layout)
        program = tuple(PreparedTask(task, task.operation.act or (lambda *_: None), (), (), None, "") for task in tasks)
        begun = BackwardPass(replica, program, self.programs, Accumulation(self.memory), self.runner.arrivals)
        self.runner.current = self.runner.last = begun
        return begun

    def ready(self, *numbers: int, last: bool = True) -> list[str]:
        """Mark gradients as ready; return what is played meanwhile."""
        before = len(self.player.played)
        for index in numbers:
            self.parameters[index].grad = torch.full((16,), float(index))
            self.begun.mark_ready(index, last)
        return self.player.played[before:]

    @property
    def begun(self) -> BackwardPass:
        assert self.runner.current is not None
        return self.runner.current

    def end(self) -> list[str]:
        before = len(self.player.played)
        self.runner.end_backward()
        return self.player.played[before:]


def test_the_tasks_of_a_bucket_follow_its_last_gradient() -> None:
    passes = Passes()
    begun = passes.begin()
    assert passes.ready(2) == FIRST[:1]
    assert passes.ready(3) == FIRST[1:]
    assert passes.ready(0) == []
    assert passes.ready(1) == SECOND
    assert passes.end() == []
    assert begun.ended
    assert begun.order == [2, 3, 0, 1]
    assert (passes.runner.current, passes.runner.last) == (None, begun)


def test_parameters_without_a_gradient_are_added_at_the_end() -> None:
    passes = Passes()
    begun = passes.begin()
    passes.ready(3)
    assert passes.end() == [*FIRST[1:], *SECOND]
    assert {index for index, gradient in begun.replica.gradients.items() if gradient is None} == {0, 1, 2}


def test_a_gradient_that_hooks_may_change_waits_for_the_next_one() -> None:
    passes = Passes()
    begun = passes.begin()
    passes.ready(3)
    assert passes.ready(2, last=False) == []
    assert 2 not in begun.replica.gradients
    assert passes.ready(1) == FIRST[1:]
    passes.ready(0, last=False)
    assert passes.end() == SECOND


def test_two_gradients_that_wait_at_once_count_both() -> None:
    """As in two reentrant checkpoints of one layer: the first hook has the sum of both when it is added."""
    passes = Passes()
    begun = passes.begin()
    passes.ready(3)
    passes.ready(2, last=False)
    passes.parameters[2].grad += 1
    begun.mark_ready(2, complete=False)
    assert passes.end() == [*FIRST[1:], *SECOND]
    assert torch.equal(begun.replica.gradients[2], torch.full((16,), 3.0))  # type: ignore[arg-type]


def test_gradients_are_taken_from_the_parameters() -> None:
    passes = Passes()
    begun = passes.begin()
    passes.ready(3)
    assert passes.parameters[3].grad is None
    assert torch.equal(begun.replica.gradients[3], torch.full((16,), 3.0))  # type: ignore[arg-type]


def test_gradients_go_to_their_buckets_at_once_where_their_weight_is_known() -> None:
    passes = Passes()
    begun = passes.begin(expected_weight=0.5)
    view = passes.memory.views[3]
    passes.ready(3)
    assert begun.replica.gradients[3] is view
    assert torch.equal(view, torch.full((16,), 1.5))
    begun.add(3, torch.ones(16))  # of another part of the backward pass
    assert torch.equal(view, torch.full((16,), 2.0))
    passes.end()
    begun.replica.weight = 0.25  # another rank has no samples of its own
    begun.replica.pack(1)
    assert torch.equal(view, torch.full((16,), 1.0))


def test_ranks_with_weights_of_their_own_keep_their_gradients() -> None:
    passes = Passes(LocalSGD(overlap="chain", every=2))
    begun = passes.begin()
    passes.ready(3)
    assert passes.parameters[3].grad is begun.replica.gradients[3]


def test_a_rank_without_samples_contributes_nothing() -> None:
    passes = Passes()
    begun = passes.begin(ControlMessage(0.0))
    passes.ready(3)
    assert begun.replica.gradients == {3: None}


def test_a_placeholder_that_was_not_cleared_stays_and_is_stale() -> None:
    passes = Passes()
    begun = passes.begin()
    passes.ready(3)
    passes.parameters[2].grad = placeholder = ScatteredGradient(passes.parameters[2], "w2")
    passes.end()
    assert begun.replica.gradients[2] is None
    assert passes.parameters[2].grad is placeholder
    assert placeholder.stale


def test_a_failed_pass_is_discarded() -> None:
    passes = Passes()
    begun = passes.begin()
    passes.ready(3, 2)
    passes.ready(1, last=False)
    assert passes.runner.discard(begun)
    assert begun.replica.discarded
    assert (passes.runner.current, passes.runner.last) == (None, None)
    again = passes.begin()
    assert not passes.runner.discard(begun)
    assert passes.runner.current is again
    passes.ready(3)
    assert 1 not in again.replica.gradients


def test_the_tasks_behind_the_users_step_wait_for_it() -> None:
    passes = Passes(LocalSGD(overlap="chain", every=1))
    assert not passes.runner.awaits_step
    passes.begin()
    passes.ready(3, 2, 1, 0)
    passes.end()
    assert passes.runner.awaits_step
    before = len(passes.player.played)
    passes.runner.finish_step()
    assert not passes.runner.awaits_step
    assert any(task.startswith("allreduce") for task in passes.player.played[before:])


def test_the_main_thread_plays_what_another_thread_makes_ready() -> None:
    passes = Passes(by_main=True)

    def backward() -> None:
        passes.begin()
        passes.ready(3, 2, 1, 0)
        passes.runner.end_backward()

    passes.runner.run_beside_main(backward)
    assert passes.player.played == [*FIRST, *SECOND]
    assert passes.player.threads == {"MainThread"}
    assert passes.runner.current is None


def test_the_main_thread_does_not_wait_for_a_pass_that_never_begins() -> None:
    passes = Passes(by_main=True)
    passes.runner.run_beside_main(lambda: None)
    assert passes.player.played == []
    with pytest.raises(AssertionError, match="a pass has begun"):
        passes.runner.end_backward()


ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


def begin(lengths: Sequence[int], order: Sequence[int], largest: int = 64) -> BackwardPass:
    """Begin a pass over parameters of these lengths; 64 bytes are a bucket for each that has 16 elements."""
    return Passes(lengths=lengths, order=order, largest=largest).begin()


def is_full(begun: BackwardPass) -> list[int]:
    return [key for key in begun.replica.layout.keys if begun.is_full(key)]


def test_a_bucket_is_full_when_all_its_gradients_are_ready() -> None:
    begun = begin([1, 1, 16], [0, 1, 2], 128)
    assert [bucket.parameters for bucket in begun.replica.layout.buckets] == [(0, 1), (2,)]
    begun.add(0, ONE)
    assert is_full(begun) == []
    begun.add(2, None)  # it has no gradient
    assert is_full(begun) == [2]
    begun.add(1, ONE)
    assert is_full(begun) == [1, 2]
    assert begun.order == [0, 2, 1]


def test_a_split_parameter_fills_all_its_buckets() -> None:
    begun = begin([48, 1], [0, 1])
    assert [bucket.parameters for bucket in begun.replica.layout.buckets] == [(0,), (0,), (0,), (1,)]
    begun.add(0, torch.ones(48))
    assert is_full(begun) == [1, 2, 3]


def test_a_second_gradient_is_added_to_the_first() -> None:
    begun = begin([1, 1], [0, 1])
    begun.add(0, ONE)
    begun.add(0, TWO)
    assert begun.replica.gradients[0] is not None
    assert begun.replica.gradients[0].tolist() == [3.0]
    assert ONE.tolist() == [1.0]
    assert begun.order == [0]
    begun.add(1, None)
    begun.add(1, TWO)
    assert begun.replica.gradients[1] is TWO


@pytest.mark.parametrize("operation", [PACK, UPDATE_LOCAL])
@pytest.mark.parametrize("lengths", [[1, 1], [48, 1]])
def test_a_second_gradient_is_refused_once_a_part_of_the_first_was_submitted(
    lengths: list[int], operation: Operation
) -> None:
    begun = begin(lengths, [0, 1])
    begun.add(0, torch.ones(lengths[0]))
    begun.mark_submitted(Task(operation, 1, UPDATE, parameters=(0,)))
    with pytest.raises(UsageError, match=r"parameter 0 .* twice .* use_reentrant=False"):
        begun.add(0, torch.ones(lengths[0]))


@given(st.data())
def test_a_bucket_is_full_with_its_last_gradient_in_any_order(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=8))
    numbers = range(len(lengths))
    begun = begin(lengths, data.draw(st.permutations(numbers)), data.draw(st.integers(1, 1000)))
    came = data.draw(st.permutations(numbers))
    for count, index in enumerate(came, 1):
        begun.add(index, torch.ones(lengths[index]))
        there = set(came[:count])
        assert is_full(begun) == [
            key for key in begun.replica.layout.keys if set(begun.replica.layout.bucket(key).parameters) <= there
        ]
    for key in begun.replica.layout.keys:
        begun.replica.pack(key)
    assert begun.order == came
    assert all(begun.replica.gradients[index] is None for index in numbers)


@pytest.mark.parametrize("called", [True, False])
def test_the_end_callback_reports_success_or_failure(called: bool) -> None:
    heard: list[str] = []
    end = BackwardEndCallback(lambda: heard.append("ended"), lambda: heard.append("failed"))
    if called:
        end()
    del end
    assert heard == ["ended" if called else "failed"]


class Waited:
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
        self.player = Waited()
        self.error: UsageError | None = None
        self.spans: list[OperationSpan] = []
        memory = SimpleNamespace(parameters=self.parameters, join=lambda: None, record_progress=lambda: None)
        programs = programs_of(self.player, memory, self.buffers, BSP(), self.spans.append, rank)
        self.times, control = programs.times, SimpleNamespace(check=self._check)
        self.runner = PassRunner(programs, control)  # type: ignore[arg-type]

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def receive(self, mean: float) -> Any:
        """Begin a pass in which rank 0's buffers arrive."""
        other = torch.nn.BatchNorm1d(2, affine=False)
        torch.nn.init.constant_(other.running_mean, mean)  # type: ignore[arg-type]
        sent = Buffers(other)
        sent.pack()
        self.buffers.flat.copy_(sent.flat)
        replica = SimpleNamespace(buffers_pending=True, discarded=False)
        last: Any = SimpleNamespace(replica=replica)
        self.runner.last = last
        return last


def test_a_wait_is_for_all_tasks_then_for_buffers_then_for_the_control_message() -> None:
    rank = Rank()
    rank.receive(3.0)
    rank.error = UsageError("rank 1 has not given the number of samples")
    with pytest.raises(UsageError, match="rank 1"):
        rank.runner.wait()
    assert rank.player.waits == [(), (BUFFERS,)]
    assert rank.model.running_mean.tolist() == [3.0, 3.0]  # type: ignore[union-attr]
    assert rank.times.waiting > 0


def test_buffers_are_copied_once_and_not_on_rank_0() -> None:
    for index in (0, 1):
        rank = Rank(index)
        last = rank.receive(3.0)
        rank.runner.wait_for_buffers()
        rank.runner.wait_for_buffers()
        assert rank.player.waits == [(BUFFERS,)]
        assert not last.replica.buffers_pending
        assert rank.model.running_mean.tolist() == [3.0 * index] * 2  # type: ignore[union-attr]


def test_a_thread_that_reads_buffers_beside_the_training_waits_too() -> None:
    rank, read = Rank(), list[float]()
    rank.receive(3.0)

    def look() -> None:
        rank.runner.wait_for_buffers()
        read.append(float(rank.model.running_mean[0]))  # type: ignore[index]

    other = Thread(target=look)

    def wait(*_: Value) -> None:
        other.start()
        other.join(0.05)  # it cannot end yet

    rank.player.wait = wait  # type: ignore[method-assign]
    rank.runner.wait_for_buffers()
    other.join()
    assert read == [3.0]


def test_buffers_are_not_waited_for_while_a_pass_runs_nor_taken_from_one_that_failed() -> None:
    rank = Rank()
    last = rank.receive(3.0)
    rank.runner.current = last
    rank.runner.wait_for_buffers()
    assert rank.player.waits == []
    rank.runner.current, last.replica.discarded = None, True
    rank.runner.wait_for_buffers()
    assert rank.model.running_mean.tolist() == [0.0, 0.0]  # type: ignore[union-attr]


def test_a_parameter_is_waited_for_when_it_is_read() -> None:
    rank = Rank()
    rank.player.pending = {weights(0), weights(1)}
    rank.runner.wait_for(rank.parameters[1])
    assert rank.player.pending == {weights(0)}
    assert [span.name for span in rank.spans] == ["wait for weights"]
    rank.runner.wait_for(rank.parameters[1])
    rank.runner.wait_for(torch.zeros(2))  # not one of the model's
    rank.runner.current = SimpleNamespace()  # type: ignore[assignment]
    rank.runner.wait_for(rank.parameters[0])  # a backward pass reads weights that are up to date
    assert rank.player.pending == {weights(0)}
    assert len(rank.spans) == 1


def test_exchanges_beside_later_steps_are_waited_for_at_the_end() -> None:
    rank = Rank()
    rank.runner.wait_for_all()
    assert rank.player.waits == [(), "over steps"]
    rank.runner.wait_for_replies()
    assert rank.player.waits[-1] == (header(0), header(1))


def test_an_error_at_the_end_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank()
    rank.player.failure = OperationError("allreduce 1 has failed")
    rank.runner.finish()
    assert capsys.readouterr().err == "unisono: the last step has failed: allreduce 1 has failed\n"
