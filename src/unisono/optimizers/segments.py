"""Segments of parameters: the parts of a bucket that lie in one rank's shard, and states of optimizers cut into them.

    bucket        │ w3 ............ │ w2 .......................... │ w1 ....... │        12 elements, 4 ranks
    shard of rank  0 0 0 │ 1 1 1 │ 2 2 2 │ 3 3 3
    segments      rank 0: (3, 0, 3)   rank 1: (3, 3, 4), (2, 0, 2)   rank 2: (2, 2, 5)   rank 3: (1, 0, 3)

A segment is (number of the parameter, its first element there, one past the last), in the order of the parameter's
memory; a complex element counts as two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from unisono.schedules.pieces import bounds

SCALARS = ("step", "mu_product", "eta", "mu")
"""Names of state of PyTorch's optimizers that is one number for a whole parameter."""

State = dict[str, Any]


class Segment(NamedTuple):
    """Part of a parameter."""

    number: int
    """Number of the parameter."""
    first: int
    last: int
    """One past its last element."""


class PlacedSegment(NamedTuple):
    """Segment, and the element of its bucket with which it begins."""

    segment: Segment
    start: int


def segments_of(
    ranges: Iterable[tuple[int, int, int, int]], length: int, ranks: int, rank: int
) -> tuple[PlacedSegment, ...]:
    """Return the segments in a rank's shard of a bucket of `length` elements.

    `ranges` has, for each parameter in it: number, begin and end in the bucket, and its element that is at `begin`. One
    without elements has its segment on every rank.

    >>> segments_of([(3, 0, 4, 0), (2, 4, 9, 0), (1, 9, 12, 0)], 12, 4, 1)
    (PlacedSegment(segment=Segment(number=3, first=3, last=4), start=3), \
PlacedSegment(segment=Segment(number=2, first=0, last=2), start=4))
    """
    low, high = bounds(length, ranks, rank)
    placed = []
    for number, begin, end, offset in ranges:
        start, stop = (begin, end) if begin == end else (max(begin, low), min(end, high))
        if begin == end or start < stop:
            placed.append(PlacedSegment(Segment(number, offset + start - begin, offset + stop - begin), start))
    return tuple(placed)


def cut(
    whole: Mapping[str, Any], parameter: torch.Tensor, strides: tuple[int, ...], segments: Iterable[Segment]
) -> dict[Segment, State]:
    """Return the state of a whole parameter as that of some of its segments, which follow these strides, copied."""
    flat = {
        name: in_order(value.detach(), strides) if _is_whole(name, value, parameter) else None
        for name, value in whole.items()
    }
    return {
        segment: {
            name: copied(whole[name] if elements is None else elements[segment.first : segment.last])
            for name, elements in flat.items()
        }
        for segment in segments
    }


def join(
    parts: Sequence[tuple[Segment, Mapping[str, Any]]], parameter: torch.Tensor, strides: tuple[int, ...]
) -> State:
    """Return the state of a whole parameter from that of all its segments, which follow these strides; empty where
    these have none."""
    joined: State = {}
    for segment, state in parts:
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                joined.setdefault(name, copied(value))
                continue
            if name not in joined:
                dtype = value.dtype.to_complex() if parameter.is_complex() else value.dtype
                flat = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
                joined[name] = flat.as_strided(parameter.shape, strides)
            in_order(joined[name], strides)[segment.first : segment.last] = value
    return joined


def _is_whole(name: str, value: object, parameter: torch.Tensor) -> bool:
    """Return True for state with an element for each of the parameter's."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return bool(parameter.dim()) or name not in SCALARS


def in_order(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the elements of a tensor, flat, in the order of memory with these strides; complex ones as pairs."""
    if value.stride() != strides:
        value = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
    flat = value.as_strided((value.numel(),), (1,), value.storage_offset())
    return torch.view_as_real(flat.resolve_conj()).view(-1) if flat.is_complex() else flat


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides where it is dense (channels last is), else those of a contiguous tensor."""
    return torch.empty_like(parameter, device="meta").stride()


def copied(value: Any) -> Any:
    """Return a copy of a tensor; any other value as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value
