"""Memory of a rule through changes of the layout of buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.reducer.test_bucket_memory import Allocator

from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.weights import SUM, RuleState, Segments, without_changes
from unisono.schedules.pieces import bounds
from unisono.step.replica import ANCHOR, MOMENTUM, RESIDUAL, SENT, SUM_RESIDUAL

RANKS = 3
SHAPES = [(5, 4), (4,), (300,), (3, 3, 3), (1,)]


def memory_of(largest: int, order: list[int]) -> BucketMemory:
    generator = torch.Generator().manual_seed(2)
    parameters = [torch.nn.Parameter(torch.randn(*shape, generator=generator).double()) for shape in SHAPES]
    memory = BucketMemory(parameters, Allocator())  # type: ignore[arg-type]
    memory.lay_out(order, largest)
    return memory


def filled(memory: BucketMemory, rank: int, in_flight: set[int]) -> RuleState:
    """A state in which everything is kept for each bucket, and some are in flight."""
    generator = torch.Generator().manual_seed(rank)
    state = RuleState(memory, rank, RANKS)
    state.lay_out(keeps_anchor=True)
    for key in memory.keys:
        length = len(memory.bucket(key))
        inside = torch.zeros(length, dtype=torch.float64)
        for piece in memory.pieces(key):
            inside[piece.here] = 1
        for name in (MOMENTUM, RESIDUAL, *([SENT] if key in in_flight else [])):
            state.kept[name, key] = torch.randn(length, generator=generator).double() * inside
        own = slice(*bounds(length, RANKS, rank))
        state.kept[SUM_RESIDUAL, key] = torch.randn(length, generator=generator).double()[own] * inside[own]
        memory.fill_bucket(key, torch.randn(length, generator=generator).double() * inside)
    return state


def by_parameter(segments: Segments, name: str) -> dict[int, torch.Tensor]:
    """Flat parameters, with zeros where nothing is kept."""
    flats = {}
    for index, begin, tensor in segments.get(name, ()):
        flat = flats.setdefault(index, torch.zeros(torch.Size(SHAPES[index]).numel(), dtype=torch.float64))
        flat[begin : begin + len(tensor)] = tensor
    return flats


orders = st.permutations(range(len(SHAPES)))
sizes = st.sampled_from([64, 256, 800, 4096])


@given(orders, sizes, st.integers(0, RANKS - 1), st.sets(st.integers(1, 3)))
def test_the_same_layout_has_the_same_bits(order: list[int], largest: int, rank: int, in_flight: set[int]) -> None:
    memory = memory_of(largest, order)
    state = filled(memory, rank, in_flight)
    before = {entry: tensor.clone() for entry, tensor in state.kept.items()}
    contents = [memory.bucket(key).clone() for key in memory.keys]
    segments = state.segments()
    again = memory_of(largest, order)
    other = RuleState(again, rank, RANKS)
    other.load(segments)
    other.lay_out(keeps_anchor=True)
    after = dict(other.kept.items())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[entry], tensor) for entry, tensor in before.items())
    for key in in_flight & set(again.keys):
        assert torch.equal(again.bucket(key), contents[key - 1])


@given(orders, orders, sizes, sizes, st.integers(0, RANKS - 1))
def test_another_layout_keeps_what_belongs_to_parameters(
    order: list[int], new_order: list[int], largest: int, new_largest: int, rank: int
) -> None:
    memory = memory_of(largest, order)
    state = filled(memory, rank, set(memory.keys))
    before = state.segments()
    state.load(state.segments())
    memory.lay_out(new_order, new_largest)
    state.lay_out(keeps_anchor=True)
    after = state.segments()
    for name in (ANCHOR, MOMENTUM, SENT, SUM):
        old, new = by_parameter(before, name), by_parameter(after, name)
        assert old.keys() == new.keys()
        assert all(torch.equal(old[index], new[index]) for index in old)
    for index in range(len(SHAPES)):  # a part of the sum's residual may belong to another shard now
        old_sum, new_sum = (
            by_parameter(segments, RESIDUAL)[index] + by_parameter(segments, SUM_RESIDUAL).get(index, 0)
            for segments in (before, after)
        )
        torch.testing.assert_close(old_sum, new_sum, rtol=0, atol=1e-12)


def test_a_change_in_flight_that_is_not_whole_is_dropped() -> None:
    memory = memory_of(256, [0, 1, 2, 3, 4])
    state = filled(memory, 0, {1})
    assert (SENT, 1) in state.kept
    state.load(state.segments())
    memory.lay_out([0, 1, 2, 3, 4], 1 << 20)  # one bucket
    state.lay_out(keeps_anchor=True)
    assert (SENT, 1) not in state.kept
    assert (ANCHOR, 1) in state.kept


def test_a_new_period_has_no_change_in_flight() -> None:
    state = filled(memory_of(256, [0, 1, 2, 3, 4]), 0, {1, 2})
    kept = without_changes(state.segments())
    assert set(kept) == {ANCHOR, MOMENTUM, RESIDUAL, SUM_RESIDUAL}


def test_an_anchor_is_made_once() -> None:
    memory = memory_of(256, [0, 1, 2, 3, 4])
    state = RuleState(memory, 0, RANKS)
    assert not state.write_anchor()
    state.lay_out(keeps_anchor=True)
    begin = [parameter.detach().clone() for parameter in memory.parameters]
    with torch.no_grad():
        for parameter in memory.parameters:
            parameter.add_(1)
    state.lay_out(keeps_anchor=True)
    assert state.write_anchor()
    for parameter, old in zip(memory.parameters, begin, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("keeps_anchor", [True, False])
def test_rules_without_an_anchor_keep_nothing(keeps_anchor: bool) -> None:
    state = RuleState(memory_of(256, [0, 1, 2, 3, 4]), 0, RANKS)
    state.lay_out(keeps_anchor)
    assert bool(state.segments()) == keeps_anchor
