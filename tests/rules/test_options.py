"""Options of rules are the fields of their classes, so that a new rule is one file and one row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from unisono import rules
from unisono.errors import RecipeError
from unisono.registry import Registry
from unisono.rules import RULES, BaseRule, LocalSGD, all_options, own_options
from unisono.tables import number
from unisono.training.recipe import Recipe, parse_recipe


def test_a_rule_has_its_own_fields_and_those_of_the_rule_that_it_extends() -> None:
    assert list(own_options("diloco")) == ["every", "outer_rate", "outer_momentum", "nesterov", "fragments", "delay"]
    assert list(own_options("bsp")) == ["scale"]
    assert own_options("sharded") == {}, "a recipe clips by its own key"
    assert own_options("rules:largest") == {}


def test_a_recipe_may_have_the_options_of_all_rules() -> None:
    assert set(all_options("bsp")) == {key for name in RULES for key in own_options(name)} == set(all_options("a:b"))


@dataclass(frozen=True)
class Seldom(LocalSGD):
    """Rule of a row that is added."""

    every: int = number(99, at_least=2)
    shyness: float = 0.5


@dataclass(frozen=True)
class Votes(BaseRule):
    """Rule whose key is of another kind than that of BSP."""

    scale: float = 0.5


@pytest.mark.parametrize("changes", [["rule.name=votes", "rule.scale=0.25"], ["rule.scale=0.25", "rule.name=votes"]])
def test_a_change_is_checked_as_a_key_of_the_rule_that_is_named(
    monkeypatch: pytest.MonkeyPatch, changes: list[str]
) -> None:
    monkeypatch.setattr(rules, "RULES", Registry("rule", {**RULES, "votes": f"{__name__}:Votes"}))
    assert parse_recipe(Recipe, {}, "a recipe", changes).rule.options["scale"] == 0.25
    with pytest.raises(RecipeError, match=r"--set rule.scale=much: rule.scale = 'much' is not a number"):
        parse_recipe(Recipe, {"rule": {"name": "votes"}}, "a recipe", ["rule.scale=much"])


def test_of_two_rules_with_the_same_key_the_one_that_is_named_has_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", Registry("rule", {**RULES, "seldom": f"{__name__}:Seldom"}))
    assert all_options("seldom")["every"].default == 99
    assert all_options("bsp")["every"].default == 16
    assert all_options("bsp")["shyness"].default == 0.5
