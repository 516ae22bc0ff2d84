"""Runs with a prediction and a measurement, made up for tests."""

from __future__ import annotations

from dataclasses import replace

from unisono.foresight.ledger import LedgerEntry
from unisono.foresight.seal import BEFORE, CostFacts, Measurement, ProgramFacts, RunFacts, SealedPrediction, Spread
from unisono.plan.choose import StepParts

RUN = RunFacts("digits", "small_convnet", "bsp", ranks=4, nodes=2, batch=64, steps=1000, machine="ours")

PREDICTION = SealedPrediction(
    sealed=BEFORE,
    version="1.0",
    run=RUN,
    parts=StepParts(0.040, 0.010, 0.002),
    low=0.0481,
    high=0.0559,
    share=0.96,
    program=ProgramFacts("chain", 8 << 20, 4, 30_000_000, "ring"),
    costs=CostFacts(1e-4, 1e-9, 1e-10),
    communicating=0.030,
    updating=0.003,
    time="2026-01-31T12:00:00+01:00",
)
"""A step of 52 ms: computing 40 ms, 10 of 30 ms of exchanges and 2 of 3 ms of updates do not hide."""


def even(seconds: float) -> Spread:
    """Return the spread of steps that all take as long."""
    return Spread(seconds, seconds * 0.98, seconds * 1.02)


def measured(
    computing: float, waiting: float, loading: float = 0.0, exchanges: float = 0.03, updates: float = 0.003
) -> Measurement:
    """Return a measurement whose parts add up."""
    return Measurement(
        steps=200,
        step=even(computing + waiting + loading),
        computing=even(computing),
        waiting=even(waiting),
        loading=even(loading),
        communicating=even(exchanges),
        updating=even(updates),
        mean_computing=computing,
        skipped=30,
        all_steps=58.0,
        timed=1100,
        wall=60.0,
    )


def entry(step: float = 0.052, version: str = "1.0", **labels: str) -> LedgerEntry:
    """Return a run whose measured step differs from the predicted one by its computing."""
    prediction = replace(PREDICTION, version=version)
    return LedgerEntry(prediction, measured(step - 0.012, 0.012), version, labels)
