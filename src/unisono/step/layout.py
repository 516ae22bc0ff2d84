"""What a rule is told of a model: its parameters, the buckets that travel, and who updates the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Bucket(NamedTuple):
    """Gradients that travel together."""

    nbytes: int
    parameters: tuple[int, ...]
    """Those that lie in it, whole or in part."""
    ranges: tuple[tuple[int, int], ...] = ()
    """First and last element (exclusive) of each parameter that lies in it; empty where all lie in it whole."""


class Updates(Enum):
    """Who applies the gradients to the weights."""

    PARTS = "parts"
    """The optimizer, a part for each bucket as soon as it is there."""
    WHOLE = "whole"
    """The optimizer, in one step when all buckets are there: it, or its hooks, see all gradients together."""
    OUTSIDE = "outside"
    """The user's loop, after it has waited for all buckets."""


@dataclass(frozen=True)
class Layout:
    """A model as a rule sees it. Parameters are numbered from 0, buckets by keys from 1 in the order of exchange."""

    ranks: int
    parameters: int
    buckets: tuple[Bucket, ...]
    filled: tuple[int, ...] = ()
    """Keys in the order in which the buckets fill; empty: the order of exchange."""
    needed: tuple[int, ...] = ()
    """Parameters in the order in which a forward pass reads them; empty: as they are numbered."""
    updates: Updates = Updates.PARTS
    deferred: bool = True
    """True where each parameter is waited for when the next forward pass reads it."""
    clip: float | None = None
    """Largest norm of all averaged gradients together."""
    buffers: bool = False
    """True where rank 0's buffers (running means of batch norms) travel with the gradients."""
    order: tuple[int, ...] = field(init=False)
    """Parameters in the order of forward passes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.needed or tuple(range(self.parameters)))
        object.__setattr__(self, "filled", self.filled or self.keys)

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the buckets in the order of exchange."""
        return tuple(range(1, len(self.buckets) + 1))

    def bucket(self, key: int) -> Bucket:
        """Return the bucket of a key."""
        return self.buckets[key - 1]

    @cached_property
    def keys_of(self) -> tuple[tuple[int, ...], ...]:
        """For each parameter, the keys of the buckets that it lies in."""
        found: list[list[int]] = [[] for _ in range(self.parameters)]
        for key, one in enumerate(self.buckets, 1):
            for number in one.parameters:
                found[number].append(key)
        return tuple(map(tuple, found))

    @cached_property
    def complete(self) -> tuple[tuple[int, ...], ...]:
        """For each key, from 0 on, the parameters of which no part is missing once its bucket has been exchanged."""
        found: list[list[int]] = [[] for _ in range(len(self.buckets) + 1)]
        for number, keys in enumerate(self.keys_of):
            found[keys[-1] if keys else 0].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def ready(self) -> tuple[tuple[int, ...], ...]:
        """For each key, from 0 on, the parameters whose gradient comes first in that bucket, as the buckets fill."""
        found: list[list[int]] = [[] for _ in range(len(self.buckets) + 1)]
        seen: set[int] = set()
        for key in self.filled:
            fresh = [number for number in self.bucket(key).parameters if number not in seen]
            found[key] = fresh
            seen.update(fresh)
        return tuple(map(tuple, found))


def even_layout(ranks: int, buckets: int, nbytes: int = 1 << 20) -> Layout:
    """Return the layout of `buckets` parameters of one size, each a bucket of its own: for pictures and tests."""
    return Layout(ranks, buckets, tuple(Bucket(nbytes, (number,)) for number in reversed(range(buckets))))
