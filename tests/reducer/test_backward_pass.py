from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.errors import UsageError
from unisono.reducer.backward_pass import BackwardPass, End
from unisono.reducer.buffers import Buffers
from unisono.reducer.control import Word, encode
from unisono.reducer.memory import Memory
from unisono.step.layout import Bucket, Layout
from unisono.step.operations import PACK, UPDATE_ALONE
from unisono.step.program import UPDATE, Operation, Task

ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


class Room:
    """All of a world that a Memory needs."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype)


class Alone:
    """Rank 0 of two, whose other rank has told a word."""

    rank, size = 0, 2

    def __init__(self, other: Word) -> None:
        self.other = other

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(torch.tensor(encode(self.other, 1, 2), dtype=tensor.dtype))


def begin(lengths: Sequence[int], order: Sequence[int], largest: int = 64, word: Word | None = None) -> BackwardPass:
    """Begin a pass over parameters of these lengths; 64 bytes are a bucket for each that has 16 elements."""
    memory = Memory([nn.Parameter(torch.zeros(length)) for length in lengths], Room())
    buckets = [Bucket(one.nbytes, one.parameters) for one in memory.lay_out(order, largest).stretches]
    layout = Layout(2, len(lengths), tuple(buckets))
    return BackwardPass(memory, Buffers(nn.Identity()), layout, word or Word(1.0))


def full(begun: BackwardPass) -> list[int]:
    return [key for key in begun.layout.keys if begun.full(key)]


def test_a_bucket_is_full_when_all_of_it_is_there() -> None:
    begun = begin([1, 1, 16], [0, 1, 2], 128)
    assert [one.parameters for one in begun.layout.buckets] == [(0, 1), (2,)]
    begun.add(0, ONE)
    assert full(begun) == []
    begun.add(2, None)  # none is there for it: it will not come
    assert full(begun) == [2]
    begun.add(1, ONE)
    assert full(begun) == [1, 2]
    assert begun.order == [0, 2, 1]


def test_a_parameter_that_is_cut_fills_all_its_buckets() -> None:
    begun = begin([48, 1], [0, 1])
    assert [one.parameters for one in begun.layout.buckets] == [(0,), (0,), (0,), (1,)]
    begun.add(0, torch.ones(48))
    assert full(begun) == [1, 2, 3]


def test_a_gradient_is_let_go_of_when_no_part_of_it_is_missing() -> None:
    begun = begin([48], [0])
    begun.add(0, torch.ones(48))
    for key in (1, 2):
        begun.pack(key)
        assert begun.fresh[0] is not None
    begun.pack(3)
    assert begun.fresh == {0: None}
    assert [begun.bucket(key)[:16].tolist() for key in begun.layout.keys] == [[1.0] * 16] * 3


def test_a_second_gradient_is_added_to_the_first() -> None:
    begun = begin([1, 1], [0, 1])
    begun.add(0, ONE)
    begun.add(0, TWO)
    assert begun.fresh[0] is not None
    assert begun.fresh[0].tolist() == [3.0]
    assert ONE.tolist() == [1.0]
    assert begun.order == [0]
    begun.add(1, None)
    begun.add(1, TWO)
    assert begun.fresh[1] is TWO


@pytest.mark.parametrize("operation", [PACK, UPDATE_ALONE])
@pytest.mark.parametrize("lengths", [[1, 1], [48, 1]])
def test_a_second_gradient_comes_too_late_when_a_part_of_the_first_has_left(
    lengths: list[int], operation: Operation
) -> None:
    begun = begin(lengths, [0, 1])
    begun.add(0, torch.ones(lengths[0]))
    begun.note(Task(operation, 1, UPDATE, parameters=(0,)))
    with pytest.raises(UsageError, match=r"parameter 0 .* twice .* use_reentrant=False"):
        begun.add(0, torch.ones(lengths[0]))


@given(st.data())
def test_whatever_comes_first_a_bucket_is_full_with_its_last_gradient(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=8))
    numbers = range(len(lengths))
    begun = begin(lengths, data.draw(st.permutations(numbers)), data.draw(st.integers(1, 1000)))
    came = data.draw(st.permutations(numbers))
    for count, number in enumerate(came, 1):
        begun.add(number, torch.ones(lengths[number]))
        there = set(came[:count])
        assert full(begun) == [key for key in begun.layout.keys if set(begun.layout.bucket(key).parameters) <= there]
    for key in begun.layout.keys:
        begun.pack(key)
    assert begun.order == came
    assert all(begun.fresh[number] is None for number in numbers)


def test_what_all_have_told_is_what_it_weighs() -> None:
    begun = begin([1], [0], word=Word(2.0))
    assert begun.agreed is None
    begun.agree(Alone(Word(6.0)))  # type: ignore[arg-type]
    assert (begun.weight, begun.void) == (0.25, False)
    assert begun.agreed is not None
    assert begun.agreed.samples == 8
    begun.agree(Alone(Word()))  # type: ignore[arg-type]
    assert begun.void


def test_what_no_rank_had_a_gradient_for_has_none_and_nothing_is_set_of_a_pass_that_has_failed() -> None:
    begun = begin([1, 1], [0, 1], 1 << 20)
    begun.add(0, ONE)
    begun.add(1, None)
    begun.pack(1)
    begun.settle(1)
    first, second = begun.memory.parameters
    assert first.grad is not None
    assert second.grad is None
    first.grad = None
    begun.drop()
    begun.settle(1)
    assert first.grad is None


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_a_parameter_that_is_cut_has_its_gradient_with_its_last_part(order: tuple[int, ...]) -> None:
    """On several communicators the part that has the flag may come first: the others are still being written."""
    begun = begin([48], [0])
    begun.add(0, torch.ones(48))
    for key in order:
        assert begun.memory.parameters[0].grad is None
        begun.pack(key)
        begun.settle(key)
    assert begun.memory.parameters[0].grad is not None


@pytest.mark.parametrize("called", [True, False])
def test_the_end_of_a_pass_is_called_or_it_has_failed(called: bool) -> None:
    heard: list[str] = []
    end = End(lambda: heard.append("ended"), lambda: heard.append("failed"))
    if called:
        end()
    del end
    assert heard == ["ended" if called else "failed"]
