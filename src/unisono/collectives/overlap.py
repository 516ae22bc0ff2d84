"""Detection of memory that tensors share, before a collective writes: it might read memory it has overwritten.

    input     | a0 | a1 | a2 |
    output         | .. |            rank 1's own chunk of the input: in place, as NCCL documents it
    output       | .. |              a part of two chunks: refused

    outputs   | b0 | b1 | b2 |       columns of one matrix share no memory, though their first and last bytes cross
    outputs   | b0 | b0 | b2 |       one tensor given twice, or an expanded one: refused

Pure functions of addresses, shapes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

WORK = 1 << 16
"""Step limit of NumPy's search for an element that two strided tensors share; beyond it they count as sharing."""


class _Elements:
    """Array interface of a tensor's elements for NumPy: only their addresses count."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        shape, data = tuple(tensor.shape), (tensor.data_ptr(), True)
        self.__array_interface__ = {"shape": shape, "strides": strides, "typestr": f"|V{size}", "data": data}


class _Span(NamedTuple):
    """Range of bytes from a tensor's first element to its last."""

    start: int
    stop: int
    written: bool
    place: int


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte and of the byte after the last; (0, 0) for an empty tensor."""
    if tensor.is_contiguous():
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        return (start, start + nbytes) if nbytes else (0, 0)
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def writable(tensor: torch.Tensor) -> bool:
    """Return True if no two elements share memory; those of an expanded tensor do."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return True
    lines = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    if lines[0][0] == 0:
        return False
    reach = 0  # elements from the first to the last of the lines seen
    nested = True
    for stride, size in lines:
        nested = nested and stride > reach
        reach += stride * (size - 1)
    if nested:
        return True
    offsets = torch.arange(reach + 1).as_strided(tensor.shape, tensor.stride())
    return bool(np.unique(offsets.numpy()).size == tensor.numel())


def shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if some element of one tensor lies in the memory of the other."""
    (start, stop), (low, high) = extent(one), extent(other)
    if stop <= low or high <= start:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    try:
        return np.shares_memory(np.asarray(_Elements(one)), np.asarray(_Elements(other)), max_work=WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors are the same elements, in the same order, in the same memory."""
    if one.data_ptr() != other.data_ptr() or one.is_conj() != other.is_conj() or one.is_neg() != other.is_neg():
        return False
    if one.is_contiguous() and other.is_contiguous():
        return one.nbytes == other.nbytes
    return one.shape == other.shape and one.stride() == other.stride()


def is_chunk(chunk: torch.Tensor, whole: torch.Tensor, start: int) -> bool:
    """Return True if `chunk` is the elements of `whole` from `start` on."""
    if not (chunk.is_contiguous() and whole.is_contiguous()) or chunk.is_neg() or whole.is_neg():
        return False
    if chunk.is_conj() or whole.is_conj():
        return False
    return chunk.data_ptr() == whole.data_ptr() + start * whole.element_size()


def find_overlap(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] = (),
    own: Collection[tuple[int, int]] = (),
    allowed: Callable[[torch.Tensor, torch.Tensor], bool] = same,
) -> str:
    """Return a description of two tensors that share memory, at least one of them an output; empty if none do.

    `own` lists (output index, input index) pairs that may share memory if `allowed(output, input)` is true.
    """
    ends = sorted(map(extent, (*outputs, *inputs)))
    if all(one[1] <= other[0] for one, other in pairwise(ends)):
        return ""
    spans = [_Span(*extent(tensor), True, place) for place, tensor in enumerate(outputs)]
    spans += [_Span(*extent(tensor), False, place) for place, tensor in enumerate(inputs)]
    spans.sort()
    before: list[_Span] = []  # those that reach to the next one
    for span in spans:
        before = [other for other in before if other.stop > span.start]
        for other in before:
            if not (span.written or other.written):
                continue
            first, second = (other, span) if other.written else (span, other)
            one, two = outputs[first.place], (outputs if second.written else inputs)[second.place]
            if not second.written and (first.place, second.place) in own and allowed(one, two):
                continue
            if shared(one, two):
                return " and ".join(sorted(map(_words, (other, span)), reverse=True))
        before.append(span)
    return ""


def _words(span: _Span) -> str:
    return f"{'output' if span.written else 'input'} {span.place}"
