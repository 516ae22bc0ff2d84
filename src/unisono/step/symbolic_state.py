"""Symbolic state of one rank while a step program is played without numbers.

    gradient of w3, part in bucket 2     {(rank 0, batch 4, version 7): 1}
    the same after an allreduce          {(0, 4, 7): 1, (1, 4, 7): 1, (2, 4, 7): 1}
    weights of w3, that part             version 8 = version 7 after an update with that sum

Versions are numbers for structures: two ranks have the same version where the same updates were applied to the same
weights in the same order. So stale, missing and doubled gradients, and ranks with different final weights, are found
without computing.

What a bucket holds is checked by its stage:

    (magnitudes ─▶ exponents ─▶ with the wire "exact")
    gradients ─▶ averaged gradients ─▶ (applied)          weights ─▶ (unpacked)
        └─▶ shard of the sum ─▶ updated shard ─▶ gathered weights ─▶ (unpacked)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from unisono.errors import StepError
from unisono.step.layout import Layout
from unisono.step.program import SymbolicEffect, Task


class Contribution(NamedTuple):
    """Gradient of one batch on one rank, made with a version of the weights."""

    rank: int
    batch: int
    version: int


Sum = Counter[Contribution]


class Versions:
    """Numbers for structures, the same for all ranks."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, *structure: Hashable) -> int:
        """Return the number of a structure."""
        return self._numbers.setdefault(structure, len(self._numbers))

    def joined(self, versions: Sequence[int], name: str) -> int:
        """Return the version of several together: their own where they are the same."""
        return versions[0] if len(set(versions)) == 1 else self.of(name, *versions)


class Stage(Enum):
    """Kind of what a bucket holds."""

    GRADIENTS = "gradients"
    MEASURED = "magnitudes of this rank's gradients"
    EXPONENTS = "exponents of all ranks' gradients"
    AVERAGED = "gradients that are set"
    SHARD = "a shard of summed gradients"
    UPDATED = "an updated shard"
    GATHERED = "gathered weights"
    WEIGHTS = "weights"
    CHANGE = "a change of weights"


class Contents(NamedTuple):
    """Contents of a bucket: for each parameter in it a sum, or the version of weights."""

    stage: Stage
    parts: dict[int, Any]
    ranks: int = 0
    """Number of ranks that weights, or their changes, were divided by."""


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
    buckets: dict[int, Contents] = field(default_factory=dict)
    received: dict[int, dict[int, int]] = field(default_factory=dict)
    """Versions of a bucket's parameters that came from the other end of an exchange, by key."""
    pulled: dict[tuple[int, int], int] = field(default_factory=dict)
    """Versions before a pull to the centre, for each parameter and bucket, until the next update."""
    applied: dict[tuple[int, int], list[tuple[Sum, int]]] = field(default_factory=dict)
    """Updates, for each parameter and bucket: the sum that was applied, and the version it was applied to."""
    anchors: dict[tuple[int, int], int] = field(default_factory=dict)
    """Version of the anchor, for each parameter and bucket that has had an outer step."""
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """Version of the weights whose change is being exchanged, for each parameter and bucket."""
    outer_steps: Counter[int] = field(default_factory=Counter)
    """Number of outer steps, for each bucket."""

    def __post_init__(self) -> None:
        begin = self.versions.of("initial")
        for parameter in range(self.layout.parameters):
            self.weights[parameter] = dict.fromkeys(self.parts_of(parameter), begin)

    def error(self, task: Task, complaint: str) -> StepError:
        return StepError(f"rank {self.rank}: {task} {complaint}")

    def parts_of(self, parameter: int) -> tuple[int, ...]:
        """Return the keys of the buckets that hold a parameter; key 0 where none does."""
        return self.layout.keys_of[parameter] or (0,)

    def anchor(self, part: tuple[int, int]) -> int:
        """Return the version of the anchor of a part, given as (parameter, bucket)."""
        return self.anchors.get(part, self.versions.of("initial"))

    def contents(self, task: Task, *stages: Stage, key: int | None = None) -> dict[int, Any]:
        """Return what the task's bucket, or that of `key`, holds. Raises StepError unless it is of these stages."""
        bucket = task.key if key is None else key
        held = self.buckets.get(bucket)
        if held is None or held.stage not in stages:
            wanted = " or ".join(stage.value for stage in stages)
            holds = "nothing" if held is None else held.stage.value
            raise self.error(task, f"needs {wanted} in bucket {bucket}, which holds {holds}")
        return held.parts

    def take_contents(self, task: Task, stage: Stage) -> Contents:
        """Remove what the task's bucket holds at this stage, and return it. Raises StepError where that is nothing."""
        self.contents(task, stage)
        return self.buckets.pop(task.key)

    def take_means(self, task: Task, stage: Stage) -> dict[int, Sum]:
        """Remove the means that the task's bucket holds, and return them. Raises StepError unless each sum has the
        contributions of as many ranks as it was divided by, each once."""
        held = self.take_contents(task, stage)
        for parameter, contributions in held.parts.items():
            doubled = sorted(contribution.rank for contribution, count in contributions.items() if count > 1)
            if doubled or len(contributions) != held.ranks:
                summed = sorted(contribution.rank for contribution in contributions)
                has = f"and its bucket has the sum of ranks {summed}, with {doubled} doubled"
                raise self.error(task, f"needs a mean over {held.ranks} ranks for parameter {parameter}, {has}")
        return held.parts

    def update(self, parameter: int, key: int, contributions: Sum) -> int:
        """Return the version of a part of a parameter's weights after an update, which is recorded. A pull to the
        centre counts as part of the update."""
        before = self.weights[parameter][key]
        made_with = self.pulled.pop((parameter, key), before)
        self.applied.setdefault((parameter, key), []).append((contributions, made_with))
        return self.versions.of("update", before, frozenset(contributions.items()))

    def check_read(self, parameter: int, task: Task) -> None:
        """Raise StepError where the backward pass may still read a parameter's weights, which `task` changes."""
        if parameter in self.seen:
            still = "which the backward pass may still read: update them after its input gradient"
            raise self.error(task, f"changes the weights of parameter {parameter}, {still}")

    def apply_averaged(self, task: Task) -> None:
        """Update the task's parameters with their averaged gradients, each of which is applied once."""
        for parameter in task.parameters:
            self.check_read(parameter, task)
            for key in self.parts_of(parameter):
                contributions = self.contents(task, Stage.AVERAGED, key=key).pop(parameter, None)
                if contributions is None:
                    before = "which was applied before: each gradient is applied once"
                    raise self.error(task, f"applies the gradient of parameter {parameter} in bucket {key}, {before}")
                self.weights[parameter][key] = self.update(parameter, key, contributions)


def each(effect: Callable[[SymbolicState, Task], None]) -> SymbolicEffect:
    """Return the effect of an operation that changes the state of each rank alone."""

    def change(ranks: Sequence[SymbolicState], task: Task) -> None:
        for state in ranks:
            effect(state, task)

    return change


def sum_buckets(*stages: Stage, into: Stage | None = None) -> SymbolicEffect:
    """Return the effect of the sum of a bucket over ranks, which have it at one of these stages; its stage is `into`
    then, without one the same. Raises StepError where a rank holds nothing of these stages."""

    def change(ranks: Sequence[SymbolicState], task: Task) -> None:
        held = [state.contents(task, *stages) for state in ranks]
        parameters = ranks[0].layout.bucket(task.key).parameters
        total: dict[int, Sum] = {parameter: Counter() for parameter in parameters}
        for parts in held:
            for parameter, contributions in total.items():
                contributions.update(parts[parameter])  # one that two of them have counts twice
        for state in ranks:
            own = {parameter: contributions.copy() for parameter, contributions in total.items()}
            before = state.buckets[task.key]
            state.buckets[task.key] = before._replace(parts=own) if into is None else Contents(into, own)

    return change
