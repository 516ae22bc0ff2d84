"""Decisions about a run's seal; the runs themselves are in tests/mpi/training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.foresight.entries import PREDICTION, RUN

from unisono.foresight.seal import RunFacts
from unisono.rules import BSP, LocalSGD
from unisono.training.foresight import RunForesight, holds, reason_without_measurement, reason_without_seal
from unisono.training.recipe import find_recipe, read_recipe
from unisono.training.run import Run
from unisono.training.trainer import Trainer


def test_a_seal_holds_for_the_same_steps_however_many_are_left() -> None:
    assert holds(PREDICTION, replace(RUN, steps=3, machine="", recipe="renamed"))
    assert holds(PREDICTION, replace(RUN, settings="9f")), "seals of older releases do not have them"


@pytest.mark.parametrize("change", [{"ranks": 2}, {"nodes": 1}, {"batch": 32}, {"settings": "9f"}])
def test_a_seal_does_not_hold_for_other_steps(change: dict[str, Any]) -> None:
    run = replace(RUN, settings="1a")
    assert not holds(replace(PREDICTION, run=run), replace(run, **change))


def facts_of(*changes: str) -> RunFacts:
    world, feed = SimpleNamespace(size=4, nodes=2), SimpleNamespace(samples=1000)
    recipe = read_recipe(find_recipe(Path("digits")), changes)
    return RunForesight(cast(Run, SimpleNamespace(recipe=recipe, world=world, feed=feed)))._facts(0)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("training.epochs=3", True),
        ("optimizer.learning_rate=0.5", True),
        ("model.name=resnet8", False),
        ("model.dtype=float64", False),
        ("training.virtual_ranks=4", False),
        ("rule.name=sharded", False),
        ("rule.every=3", False),
        ("compute.threads=1", False),
        ("exchange.wire=float16", False),
        ("parallel.layers=auto", False),
        ("optimizer.momentum=0", False),
        ("data.storage=streamed", False),
    ],
)
def test_a_seal_holds_for_the_same_settings(change: str, same: bool) -> None:
    assert holds(replace(PREDICTION, run=facts_of()), facts_of(change)) == same


def trainer_of(ranks: int, rule: object) -> Trainer:
    return cast(Trainer, SimpleNamespace(world=SimpleNamespace(size=ranks), reducer=SimpleNamespace(rule=rule)))


def test_reasons_for_which_there_is_no_seal() -> None:
    assert reason_without_seal(trainer_of(1, BSP())) == "one rank measures no exchange"
    assert reason_without_seal(trainer_of(2, LocalSGD(every=2))).startswith("the steps of LocalSGD are not alike")
    assert reason_without_seal(trainer_of(2, BSP())) == "overlap and buckets were not searched"


def test_reasons_for_which_there_is_no_measurement() -> None:
    assert reason_without_measurement(1, 25) == "the run has no step after the first 25 steps"
    assert reason_without_measurement(4, 25) == "the run has no 4 steps after the first 25 steps"
