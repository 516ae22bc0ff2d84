from __future__ import annotations

import pytest

from unisono.errors import RecipeError
from unisono.training.recipe import Recipe, parse_recipe
from unisono.training.resuming import Place, check_change


def recipe(**tables: dict[str, object]) -> Recipe:
    return parse_recipe(tables, "a test")


BEFORE = recipe(training={"batch": 64, "seed": 1})
WITHIN, BETWEEN = Place(epoch=3, done=5, step=20, data="these"), Place(epoch=3, step=20, data="these")

CHANGES = [
    (recipe(training={"batch": 32, "seed": 1}), "these", r"training\.batch = 32, but the run stopped 5 steps into"),
    (recipe(training={"batch": 64, "seed": 2}), "these", r"training\.seed = 2, but the run stopped 5 steps into"),
    (BEFORE, "others", r"5 steps into an epoch of other data \(these\) than now \(others\)"),
]


@pytest.mark.parametrize(("now", "data", "words"), CHANGES)
def test_within_an_epoch_its_order_stays(now: Recipe, data: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        check_change(BEFORE, now, WITHIN, data)


@pytest.mark.parametrize(("now", "data", "words"), CHANGES)
def test_between_epochs_it_may_change(now: Recipe, data: str, words: str) -> None:
    check_change(BEFORE, now, BETWEEN, data)


def test_the_rate_may_always_change_and_the_optimizer_never() -> None:
    changed = {"learning_rate": 0.5, "policy": "cosine", "weight_decay": 0.1}
    for place in (WITHIN, BETWEEN):
        check_change(BEFORE, recipe(training={"batch": 64, "seed": 1}, optimizer=changed), place, "these")
        with pytest.raises(RecipeError, match=r"optimizer\.name = 'lamb', but the run has the state of 'sgd'"):
            check_change(BEFORE, recipe(optimizer={"name": "lamb"}), place, "these")
