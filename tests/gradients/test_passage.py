from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.gradients.control import Word, decode, encode
from unisono.gradients.layout import Bucket, plan_layout
from unisono.gradients.passage import End, Passage

ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


def bucket(*parameters: int) -> Bucket:
    return Bucket(torch.float32, 0, 16, parameters, 16, ())


def leave(passage: Passage, after: bool = False) -> list[int]:
    """The buckets that leave now."""
    left = []
    while passage.full(after):
        left.append(passage.next)
        passage.next += 1
    return left


def test_a_bucket_leaves_when_all_of_it_is_there() -> None:
    passage = Passage([bucket(2, 1), bucket(0)], 3, Word(8.0))
    passage.add(2, ONE)
    assert leave(passage) == []
    passage.add(1, ONE)
    assert leave(passage) == [0]
    passage.add(0, ONE)
    assert leave(passage) == [1]
    assert not passage.full(after=False)
    assert passage.order == [2, 1, 0]
    assert passage.word == Word(8.0)


def test_buckets_leave_in_their_order_whatever_fills_first() -> None:
    passage = Passage([bucket(2), bucket(1), bucket(0)], 3, Word(1.0))
    passage.add(0, ONE)
    passage.add(1, ONE)
    assert leave(passage) == []
    passage.add(2, ONE)
    assert leave(passage) == [0, 1, 2]


def test_none_leaves_before_the_backward_pass_has_ended_where_that_is_asked() -> None:
    passage = Passage([bucket(1), bucket(0)], 2, Word(1.0))
    passage.add(1, ONE)
    passage.add(0, ONE)
    assert leave(passage, after=True) == []
    passage.ended = True
    assert leave(passage, after=True) == [0, 1]


def test_a_parameter_without_a_gradient_is_there_as_well() -> None:
    passage = Passage([bucket(1, 0)], 2, Word(0.0))
    passage.add(1, None)
    passage.add(0, None)
    assert passage.fresh == {0: None, 1: None}
    assert leave(passage) == [0]


def test_a_parameter_that_is_cut_fills_all_its_buckets() -> None:
    passage = Passage([bucket(1), bucket(1), bucket(1, 0)], 2, Word(1.0))
    passage.add(1, ONE)
    assert leave(passage) == [0, 1]
    passage.add(0, ONE)
    assert leave(passage) == [2]


def test_a_gradient_is_let_go_of_when_no_part_of_it_is_missing() -> None:
    buckets = [bucket(1), bucket(1, 0)]
    passage = Passage(buckets, 2, Word(1.0))
    passage.add(1, ONE)
    passage.add(0, TWO)
    passage.packed(buckets[0])
    assert passage.fresh == {1: ONE, 0: TWO}
    passage.packed(buckets[1])
    assert passage.fresh == {1: None, 0: None}


def test_a_second_gradient_is_added_to_the_first() -> None:
    passage = Passage([bucket(1, 0)], 2, Word(1.0))
    passage.add(0, ONE)
    passage.add(0, TWO)
    assert passage.fresh[0].tolist() == [3.0]
    assert ONE.tolist() == [1.0]
    assert passage.order == [0]
    assert leave(passage) == []
    passage.add(1, None)
    passage.add(1, TWO)
    assert passage.fresh[1] is TWO
    assert leave(passage) == [0]


@pytest.mark.parametrize("buckets", [[bucket(0), bucket(1)], [bucket(0), bucket(0), bucket(1)]])
def test_a_second_gradient_comes_too_late_when_a_part_of_the_first_has_left(buckets: list[Bucket]) -> None:
    passage = Passage(buckets, 2, Word(1.0))
    passage.add(0, ONE)
    passage.next = 1
    with pytest.raises(UsageError, match=r"parameter 0 .* twice .* use_reentrant=False"):
        passage.add(0, TWO)


@given(st.data())
def test_whatever_comes_first_all_leave_once_in_order_and_only_when_full(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=8))
    parameters, numbers = [(length, torch.float32) for length in lengths], range(len(lengths))
    planned = plan_layout(parameters, data.draw(st.permutations(numbers)), data.draw(st.integers(1, 1000))).buckets
    buckets = data.draw(st.permutations(planned))
    passage = Passage(buckets, len(lengths), Word(1.0))
    came, left = data.draw(st.permutations(numbers)), []
    for number in came:
        passage.add(number, ONE)
        for place in leave(passage):
            assert set(buckets[place].parameters) <= set(passage.order)
            passage.packed(buckets[place])
            left.append(place)
        if len(left) < len(buckets):
            assert not set(buckets[len(left)].parameters) <= set(passage.order)
    assert left == list(range(len(buckets)))
    assert passage.order == came
    assert all(passage.fresh[number] is None for number in numbers)


def test_what_all_have_told_is_what_it_weighs() -> None:
    passage = Passage([bucket(0)], 1, Word(2.0))
    assert passage.agreed is None
    agreed = decode([one + other for one, other in zip(encode(Word(2.0), 0, 2), encode(Word(6.0), 1, 2), strict=True)])
    passage.settle(agreed)
    assert (passage.weight, passage.void, passage.agreed) == (0.25, False, agreed)
    passage.settle(
        decode([one + other for one, other in zip(encode(Word(2.0), 0, 2), encode(Word(), 1, 2), strict=True)])
    )
    assert passage.void


@pytest.mark.parametrize("called", [True, False])
def test_the_end_of_a_pass_is_called_or_it_has_failed(called: bool) -> None:
    heard: list[str] = []
    end = End(lambda: heard.append("ended"), lambda: heard.append("failed"))
    if called:
        end()
    del end
    assert heard == ["ended" if called else "failed"]
