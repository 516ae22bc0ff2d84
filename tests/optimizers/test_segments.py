"""Segments: a bucket is cut without gap or overlap, and what is cut is joined again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.optimizers.segments import Segment, cut, dense_strides, join, segments_of


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 3))
def test_the_ranks_have_every_element_once(lengths: list[int], ranks: int, gap: int) -> None:
    ranges, at = [], 0
    for number, length in enumerate(lengths):
        ranges.append((number, at, at + length, 5 * number))
        at += length + gap
    found = [one for rank in range(ranks) for one in segments_of(ranges, at, ranks, rank)]
    elements = [(one.segment.number, element) for one in found for element in range(*one.segment[1:])]
    assert elements == [(number, 5 * number + e) for number, length in enumerate(lengths) for e in range(length)]
    starts = {number: begin for number, begin, _, _ in ranges}
    assert all(start - starts[one.number] == one.first - 5 * one.number for one, start in found)
    empty = [number for number, length in enumerate(lengths) if not length]
    assert [one.segment.number for one in found if one.segment.first == one.segment.last] == ranks * empty


@pytest.mark.parametrize(
    "parameter",
    [
        torch.randn(3, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7, dtype=torch.complex128),
        torch.tensor(3.0),
        torch.randn(6, 4).t(),
    ],
    ids=["matrix", "channels last", "complex", "no dimension", "transposed"],
)
def test_what_is_cut_is_joined_again(parameter: torch.Tensor) -> None:
    whole: dict[str, Any] = {
        "exp_avg": torch.randn_like(parameter),
        "step": torch.tensor(4.0),
        "momentum_buffer": None,
        "rate": 0.5,
    }
    length = parameter.numel() * (2 if parameter.is_complex() else 1)
    parts = cut(
        whole, parameter, dense_strides(parameter), [Segment(0, 0, length // 3), Segment(0, length // 3, length)]
    )
    assert [state["exp_avg"].shape for state in parts.values()] == [(length // 3,), (length - length // 3,)]
    found = join(list(parts.items()), parameter, dense_strides(parameter))
    assert found.keys() == whole.keys()
    assert torch.equal(found["exp_avg"], whole["exp_avg"])
    assert found["exp_avg"].stride() == torch.empty_like(parameter).stride()
    assert (found["step"], found["momentum_buffer"], found["rate"]) == (torch.tensor(4.0), None, 0.5)


def test_nothing_is_joined_to_nothing() -> None:
    assert join([], torch.ones(3), (1,)) == {}
