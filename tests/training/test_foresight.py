"""Decisions about a run's seal; the runs themselves are in tests/mpi/training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.foresight.entries import PREDICTION, RUN

from unisono.foresight.seal import RunFacts, Seal
from unisono.placement import one_rank_per_node, place
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
    return RunForesight(cast(Run, SimpleNamespace(recipe=recipe, world=world, feed=feed)))._facts()


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


def test_a_step_without_products_or_known_memory_has_no_seal_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "two_embeddings.py").write_text(
        "from torch import nn\n"
        "class Recommender(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.users, self.items = nn.Embedding(50, classes), nn.Embedding(50, classes)\n"
        "    def forward(self, pairs):\n"
        "        return self.users(pairs[:, 0]) * self.items(pairs[:, 1])\n"
        "def recommender(classes, channels):\n"
        "    return Recommender(classes)\n"
    )
    changes = ["model.name=two_embeddings:recommender", f"model.folder={tmp_path}"]
    recipe, world = (
        read_recipe(find_recipe(Path("digits")), changes),
        SimpleNamespace(size=4, nodes=2, placement=place([0, 0, 1, 1])),
    )
    feed = SimpleNamespace(samples=1000, classes=10, blank=lambda count: torch.empty(count, 2))
    run = SimpleNamespace(recipe=recipe, world=world, feed=feed, trainer=SimpleNamespace(device=torch.device("cpu")))
    foresight = RunForesight(cast(Run, run))
    reason = foresight._planned("aws_c4_8xlarge")
    assert str(reason).startswith("none of the model's layers makes a product, and 2 x 9 cores E5-2666v3")
    of_accelerators = str(foresight._planned("minsky_p100"))
    assert of_accelerators.startswith("the run computes on cpu, and ")
    assert of_accelerators.endswith(" has 4 accelerators")


def test_what_a_sealed_prediction_does_not_count_is_logged(tmp_path: Path) -> None:
    recipe = read_recipe(find_recipe(Path("digits")), ["model.dtype=float64"])
    world, said = SimpleNamespace(size=2, nodes=2, placement=one_rank_per_node(2)), list[str]()
    feed = SimpleNamespace(samples=1000, classes=10, blank=lambda count: torch.empty(count, 1, 8, 8))
    run = SimpleNamespace(recipe=recipe, world=world, feed=feed, trainer=SimpleNamespace(device=torch.device("cpu")))
    run.home, run.display = tmp_path, SimpleNamespace(log=said.append)
    assert isinstance(RunForesight(cast(Run, run))._planned("aws_c4_8xlarge"), Seal)
    assert said == ["not in these numbers: products in float64, about half as fast, and fewer bits of wires"]


def trainer_of(ranks: int, rule: object) -> Trainer:
    return cast(Trainer, SimpleNamespace(world=SimpleNamespace(size=ranks), reducer=SimpleNamespace(rule=rule)))


def test_reasons_for_which_there_is_no_seal() -> None:
    assert reason_without_seal(trainer_of(1, BSP())) == "one rank measures no exchange"
    assert reason_without_seal(trainer_of(2, LocalSGD(every=2))).startswith("the steps of LocalSGD are not alike")
    assert reason_without_seal(trainer_of(2, BSP())) == "overlap and buckets were not searched"


def test_reasons_for_which_there_is_no_measurement() -> None:
    assert reason_without_measurement(1, 25) == "the run has no step after the first 25 steps"
    assert reason_without_measurement(4, 25) == "the run has no 4 steps after the first 25 steps"
