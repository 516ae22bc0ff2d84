"""Symbolic state of one rank while a step program is played without numbers.

    gradient of w3, part in bucket 2     {(rank 0, batch 4, version 7): 1}
    the same after an allreduce          {(0, 4, 7): 1, (1, 4, 7): 1, (2, 4, 7): 1}
    weights of w3, that part             version 8 = version 7 after an update with that sum

Versions are numbers for structures: two ranks have the same version where the same updates were applied to the same
weights in the same order. So stale, missing and doubled gradients, and ranks with different final weights, are found
without computing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unisono.errors import StepError
from unisono.step.layout import Layout
from unisono.step.program import Task


class Contribution(NamedTuple):
    """Gradient of one batch on one rank, made with a version of the weights."""

    rank: int
    batch: int
    version: int


Sum = Counter[Contribution]


class AppliedUpdate(NamedTuple):
    """Update of a part of a parameter's weights: the sum that was applied, and the version it was applied to."""

    sum: Sum
    version: int


class Versions:
    """Numbers for structures, the same for all ranks."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, *structure: Hashable) -> int:
        """Return the number of a structure."""
        return self._numbers.setdefault(structure, len(self._numbers))


@dataclass
class BucketContents:
    """Contents of a bucket: for each parameter in it, a sum of gradients, or of versions of weights."""

    parts: dict[int, Counter[Contribution]]
    ready: bool = False
    """True once it may be applied."""
    whole: bool = True
    """False where this rank has only its own shard of the sum."""


@dataclass
class SymbolicState:
    """Symbolic values of one rank."""

    rank: int
    layout: Layout
    versions: Versions
    absent: frozenset[int] = frozenset()
    """Batches that this rank lacks."""
    batch: int = -1
    """Batch of the present step."""
    begun: int = -1
    """Batch of the last backward pass that has begun."""
    control: int = -1
    """Batch of the last control message."""
    made: dict[int, int] = field(default_factory=dict)
    """Batch of the last gradient, for each parameter."""
    weights: dict[int, dict[int, int]] = field(default_factory=dict)
    """Version of each part of a parameter's weights, for each parameter and each bucket that holds a part of it."""
    seen: dict[int, dict[int, int]] = field(default_factory=dict)
    """Versions of the parts that the forward pass has read, for each parameter."""
    gradients: dict[int, dict[int, Sum]] = field(default_factory=dict)
    buckets: dict[int, BucketContents] = field(default_factory=dict)
    shards: dict[int, dict[int, int]] = field(default_factory=dict)
    """Versions of a bucket's parameters after the update of this rank's shard, by key, until they are unpacked."""
    gathered: dict[int, dict[int, int]] = field(default_factory=dict)
    """Versions of a bucket's parameters that all ranks' shards give, by key, until they are unpacked."""
    received: dict[int, dict[int, int]] = field(default_factory=dict)
    """Versions of a bucket's parameters that came from the other end of an exchange, by key."""
    pulled: dict[tuple[int, int], int] = field(default_factory=dict)
    """Versions before a pull to the centre, for each parameter and bucket, until the next update."""
    applied: dict[tuple[int, int], list[AppliedUpdate]] = field(default_factory=dict)
    """Updates, for each parameter and bucket."""
    anchors: dict[tuple[int, int], int] = field(default_factory=dict)
    """Version of the anchor, for each parameter and bucket that has had an outer step."""
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """Version of the weights whose change is being exchanged, for each parameter and bucket."""
    outer_steps: Counter[int] = field(default_factory=Counter)
    """Number of outer steps, for each bucket."""

    def __post_init__(self) -> None:
        begin = self.versions.of("initial")
        for number in range(self.layout.parameters):
            self.weights[number] = dict.fromkeys(self.parts_of(number), begin)

    def parts_of(self, number: int) -> tuple[int, ...]:
        """Return the keys of the buckets that hold a parameter; key 0 where none does."""
        return self.layout.keys_of[number] or (0,)

    def version(self, number: int) -> int:
        """Return the version of all parts of a parameter's weights together."""
        parts = tuple(self.weights[number].values())
        return parts[0] if len(set(parts)) == 1 else self.versions.of("parts", parts)

    def anchor(self, part: tuple[int, int]) -> int:
        """Return the version of the anchor of a part, given as (parameter, bucket)."""
        return self.anchors.get(part, self.versions.of("initial"))

    def apply(self, number: int, key: int, contributions: Sum) -> None:
        """Update a part of a parameter's weights. A pull to the centre counts as part of the update."""
        self.weights[number][key] = self.apply_apart(number, key, contributions)

    def apply_apart(self, number: int, key: int, contributions: Sum) -> int:
        """Return the version of an update of a part of a parameter's weights, which are not changed yet."""
        before = self.weights[number][key]
        made_with = self.pulled.pop((number, key), before)
        self.applied.setdefault((number, key), []).append(AppliedUpdate(contributions, made_with))
        return self.versions.of("update", before, frozenset(contributions.items()))

    def check_read(self, number: int, task: Task) -> None:
        """Raise StepError where the backward pass may still read a parameter's weights, which `task` changes."""
        if number in self.seen:
            raise StepError(
                f"rank {self.rank}: {task} changes the weights of parameter {number}, which the backward pass may "
                "still read: update them after its input gradient"
            )

    def take(self, number: int, key: int, who: object, shard: bool = False) -> Sum:
        """Remove a bucket's sum for a parameter, and return it to be applied. Raises StepError where it is missing, not
        ready, or not there as a whole; with `shard`, where it is there as a whole."""
        sent = self.buckets.get(key)
        if sent is None or number not in sent.parts:
            raise StepError(
                f"rank {self.rank}: {who} applies the gradient of parameter {number} in bucket {key}, which is not "
                "there or was applied before: each gradient is applied once"
            )
        if not sent.ready:
            raise StepError(f"rank {self.rank}: {who} applies bucket {key} before its gradients are set")
        if sent.whole == shard:
            there, applied = ("whole", "shard") if shard else ("shard", "whole")
            raise StepError(f"rank {self.rank}: {who} applies the {applied} of bucket {key}, whose {there} was summed")
        return sent.parts.pop(number)


def sum_contributions(sums: Iterable[Counter[Contribution]]) -> Counter[Contribution]:
    """Return the sum of sums. A contribution that is in two of them counts twice."""
    total: Counter[Contribution] = Counter()
    for one in sums:
        total.update(one)
    return total


def change_nothing(_: Sequence[SymbolicState], __: Task) -> None:
    """Change no symbol: the effect of an operation that moves no gradient and no weight."""
