"""Memory that tensors share, beside sets of addresses."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.collectives.payload import extent, find_aliases, is_chunk, is_writable, same_elements, share_memory

SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3)
"""Sizes and strides of a tensor."""


def strided(memory: torch.Tensor, lines: list[tuple[int, int]], start: int) -> torch.Tensor:
    return memory.as_strided([size for size, _ in lines], [stride for _, stride in lines], start)


def offsets(tensor: torch.Tensor) -> list[int]:
    """The place of each element in the memory, which holds its places."""
    return [int(place) for place in tensor.flatten()]


@given(SHAPES, SHAPES, st.integers(0, 40), st.integers(0, 40))
def test_elements_in_common(
    lines: list[tuple[int, int]], others: list[tuple[int, int]], first: int, second: int
) -> None:
    memory = torch.arange(200)
    a, b = strided(memory, lines, first), strided(memory, others, second)
    common = set(offsets(a)) & set(offsets(b))
    assert share_memory(a, b) == bool(common)
    assert bool(find_aliases([a], [b])) == bool(find_aliases([a, b])) == bool(common)
    assert not find_aliases([], [a, b])
    assert not find_aliases([a], [b], [(0, 0)], lambda *_: True)
    assert is_writable(a) == (len(set(offsets(a))) == len(offsets(a)))
    start, stop = extent(a)
    if offsets(a):
        assert [start, stop] == [memory.data_ptr() + 8 * min(offsets(a)), memory.data_ptr() + 8 * max(offsets(a)) + 8]
    if same_elements(a, b) and offsets(a):
        assert offsets(a) == offsets(b)


def test_columns_of_a_matrix_share_nothing() -> None:
    columns = list(torch.zeros(5, 4).unbind(1))
    assert not find_aliases(columns)
    assert find_aliases([*columns, columns[2]]) == "output 4 and output 2"
    assert find_aliases(columns, [columns[2]]) == "output 2 and input 0"
    assert not find_aliases(columns, [columns[2]], in_place=[(2, 0)])
    assert find_aliases(columns, [columns[2].flip(0), columns[1][:3]], in_place=[(1, 1)]) == "output 1 and input 1"


def test_only_the_own_chunk_is_in_place() -> None:
    full = torch.zeros(6)
    assert is_chunk(full[2:4], full, 2)
    assert not is_chunk(full[3:5], full, 2)
    assert not is_chunk(torch._neg_view(full[2:4]), full, 2)
    assert not is_chunk(full[2:4].clone(), full, 2)


def test_conjugate_and_negative_bits_distinguish_elements() -> None:
    tensor = torch.ones(3, dtype=torch.complex64)
    assert same_elements(tensor, tensor.view(3))
    assert not same_elements(tensor, tensor.conj())
    assert not same_elements(tensor.imag, tensor.conj().imag)
