"""Chooses where communication sits in the step, and in what buckets it goes, by prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from unisono.engine.embeddings import EMBEDDINGS, OUTSTANDING
from unisono.plan.computing import Computing, Cost, Load, Prediction
from unisono.plan.order import sequence
from unisono.plan.step import predict

SIZES = tuple(1 << power for power in range(19, 28))
"""Bytes that a bucket may have at most: 512 KiB to 128 MiB."""

WITHIN = 1.01
"""A prediction that is so near to the best is as good: then larger buckets, and what is simpler, are chosen."""

FINER = 4
"""How many of the finer buckets go into one."""

SIMPLEST = ("none", "chain", "funnel", "concurrent")


class Setting(NamedTuple):
    """How the gradients of a step meet. All ranks have the same."""

    embedding: str
    bucket_bytes: int
    sequence: tuple[int, ...]
    """The order in which the buckets are exchanged, by number; empty: as they are planned."""


class Candidate(NamedTuple):
    """A setting, and what it is predicted to take."""

    setting: Setting
    prediction: Prediction


def candidates(
    computing: Computing,
    loads: Callable[[int], Sequence[Load]],
    cost: Cost,
    embeddings: Iterable[str] = tuple(EMBEDDINGS),
    sizes: Iterable[int] = SIZES,
    outstanding: int = OUTSTANDING,
    deferred: bool = True,
) -> list[Candidate]:
    """For each embedding the best size of buckets; the fastest first. `loads` gives the buckets for a largest size.

    Only `chain` with a deferred wait gains from another order of exchange than that in which buckets fill.
    """
    sizes = sorted(sizes)
    found = [
        _best([_candidate(computing, loads(size), size, cost, name, outstanding, deferred) for size in sizes])
        for name in sorted(embeddings, key=SIMPLEST.index)
    ]
    best = min(one.prediction.step for one in found)
    return sorted(found, key=lambda one: max(one.prediction.step, best * WITHIN))


def finer(
    candidate: Candidate,
    computing: Computing,
    loads: Callable[[int], Sequence[Load]],
    cost: Cost,
    sizes: Iterable[int] = SIZES,
    outstanding: int = OUTSTANDING,
    deferred: bool = True,
) -> Candidate | None:
    """The same embedding with buckets a quarter as large; None where `sizes` has none, or the buckets stay the same.

    Of two sizes that are predicted to be alike `candidates` takes the larger; long exchanges hold others up.
    """
    name, largest, _ = candidate.setting
    size = largest // FINER
    if size not in sizes or len(loads(size)) == len(loads(largest)):
        return None
    return _candidate(computing, loads(size), size, cost, name, outstanding, deferred)


def _candidate(
    computing: Computing, loads: Sequence[Load], size: int, cost: Cost, name: str, outstanding: int, deferred: bool
) -> Candidate:
    order = sequence(computing, loads, cost) if deferred and name == "chain" else ()
    sent = [loads[number] for number in order] or loads
    return Candidate(
        Setting(name, size, order), predict(computing, sent, cost, EMBEDDINGS[name], outstanding, deferred)
    )


def _best(of_sizes: Sequence[Candidate]) -> Candidate:
    """The one with the largest buckets among those that are about the fastest."""
    best = min(one.prediction.step for one in of_sizes)
    return next(one for one in reversed(of_sizes) if one.prediction.step <= best * WITHIN)
