from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.errors import UsageError
from unisono.reducer.backward_pass import BackwardPass
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import ControlMessage, encode
from unisono.reducer.hooks import BackwardEndCallback
from unisono.step.layout import Bucket, Layout
from unisono.step.operations import PACK, UPDATE_LOCAL
from unisono.step.program import UPDATE, Operation, Task

ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


class Room:
    """World with the one method that a BucketMemory uses."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype)


class Alone:
    """Rank 0 of two; the other rank contributes `other`."""

    rank, size = 0, 2

    def __init__(self, other: ControlMessage) -> None:
        self.other = other

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(torch.tensor(encode(self.other, 1, 2), dtype=tensor.dtype))


def begin(
    lengths: Sequence[int], order: Sequence[int], largest: int = 64, message: ControlMessage | None = None
) -> BackwardPass:
    """Begin a pass over parameters of these lengths; 64 bytes are a bucket for each that has 16 elements."""
    memory = BucketMemory([nn.Parameter(torch.zeros(length)) for length in lengths], Room())
    buckets = [Bucket(one.nbytes, one.parameters) for one in memory.lay_out(order, largest).buckets]
    layout = Layout(2, len(lengths), tuple(buckets))
    return BackwardPass(memory, Buffers(nn.Identity()), layout, message or ControlMessage(1.0))


def is_full(begun: BackwardPass) -> list[int]:
    return [key for key in begun.layout.keys if begun.is_full(key)]


def test_a_bucket_is_full_when_all_its_gradients_are_ready() -> None:
    begun = begin([1, 1, 16], [0, 1, 2], 128)
    assert [one.parameters for one in begun.layout.buckets] == [(0, 1), (2,)]
    begun.add(0, ONE)
    assert is_full(begun) == []
    begun.add(2, None)  # it has no gradient
    assert is_full(begun) == [2]
    begun.add(1, ONE)
    assert is_full(begun) == [1, 2]
    assert begun.order == [0, 2, 1]


def test_a_split_parameter_fills_all_its_buckets() -> None:
    begun = begin([48, 1], [0, 1])
    assert [one.parameters for one in begun.layout.buckets] == [(0,), (0,), (0,), (1,)]
    begun.add(0, torch.ones(48))
    assert is_full(begun) == [1, 2, 3]


def test_a_gradient_is_released_when_all_its_parts_are_packed() -> None:
    begun = begin([48], [0])
    begun.add(0, torch.ones(48))
    for key in (1, 2):
        begun.pack(key)
        assert begun.gradients[0] is not None
    begun.pack(3)
    assert begun.gradients == {0: None}
    assert [begun.bucket(key)[:16].tolist() for key in begun.layout.keys] == [[1.0] * 16] * 3


def test_a_second_gradient_is_added_to_the_first() -> None:
    begun = begin([1, 1], [0, 1])
    begun.add(0, ONE)
    begun.add(0, TWO)
    assert begun.gradients[0] is not None
    assert begun.gradients[0].tolist() == [3.0]
    assert ONE.tolist() == [1.0]
    assert begun.order == [0]
    begun.add(1, None)
    begun.add(1, TWO)
    assert begun.gradients[1] is TWO


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
    for count, number in enumerate(came, 1):
        begun.add(number, torch.ones(lengths[number]))
        there = set(came[:count])
        assert is_full(begun) == [key for key in begun.layout.keys if set(begun.layout.bucket(key).parameters) <= there]
    for key in begun.layout.keys:
        begun.pack(key)
    assert begun.order == came
    assert all(begun.gradients[number] is None for number in numbers)


def test_the_weight_comes_from_all_control_messages() -> None:
    begun = begin([1], [0], message=ControlMessage(2.0))
    assert begun.control_result is None
    begun.agree(Alone(ControlMessage(6.0)))  # type: ignore[arg-type]
    assert (begun.weight, begun.discarded) == (0.25, False)
    assert begun.control_result is not None
    assert begun.control_result.samples == 8
    begun.agree(Alone(ControlMessage()))  # type: ignore[arg-type]
    assert begun.discarded


def test_no_gradient_without_one_on_any_rank_and_none_of_a_failed_pass() -> None:
    begun = begin([1, 1], [0, 1], 1 << 20)
    begun.add(0, ONE)
    begun.add(1, None)
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
    begun.add(0, torch.ones(48))
    for key in order:
        assert begun.memory.parameters[0].grad is None
        begun.pack(key)
        begun.set_grads(key)
    assert begun.memory.parameters[0].grad is not None


@pytest.mark.parametrize("called", [True, False])
def test_the_end_callback_reports_success_or_failure(called: bool) -> None:
    heard: list[str] = []
    end = BackwardEndCallback(lambda: heard.append("ended"), lambda: heard.append("failed"))
    if called:
        end()
    del end
    assert heard == ["ended" if called else "failed"]
