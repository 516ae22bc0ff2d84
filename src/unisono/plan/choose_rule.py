"""Choice of a rule by prediction: each with its own best overlap and buckets.

rules       BSP                Sharded
best        chain, 8 MiB       chain, 4 MiB         of each, by `choose.candidates`
step        120 ms             95 ms                the shortest is taken; within 1%, the rule that is named first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unisono.plan.choose import TIE_RATIO, Candidate, PredictionInputs, candidates
from unisono.rules import BaseRule
from unisono.step.costs import Cost

COLLECTIVES_OF_A_SHARD = 3
"""Collectives for a bucket under a sharded rule: its reduce-scatter, flags and all-gather."""


class RuleCandidate(NamedTuple):
    """Rule with its best setting, and the times predicted for it."""

    rule: BaseRule
    best: Candidate


def rank_rules(
    rules: Sequence[BaseRule],
    inputs: PredictionInputs,
    overlaps: Iterable[str],
    sizes: Iterable[int],
    outstandings: Iterable[int],
) -> list[RuleCandidate]:
    """Return the rules with their best settings, the fastest first. The rule of `inputs` is not used.

    The cost is that of allreduces. Each collective of a sharded rule is taken to have the latency of one.
    """
    space = tuple(overlaps), tuple(sizes), tuple(outstandings)
    latency, per_byte = inputs.cost
    sharded = Cost(COLLECTIVES_OF_A_SHARD * latency, per_byte)
    found = [
        RuleCandidate(
            rule, candidates(inputs._replace(rule=rule, cost=sharded if rule.sharded else inputs.cost), *space)[0]
        )
        for rule in rules
    ]
    best = min(one.best.prediction.step for one in found)
    return sorted(found, key=lambda one: max(one.best.prediction.step, best * TIE_RATIO))


def describe(ranked: Sequence[RuleCandidate]) -> str:
    """Return a line about the choice, for the log."""
    words = [f"{type(one.rule).__name__} {one.best.prediction.step * 1e3:.1f} ms" for one in ranked]
    return f"rule {type(ranked[0].rule).__name__}: a step is predicted to take {', '.join(words)}"
