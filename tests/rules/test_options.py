"""Options of rules are the fields of their classes, so that a new rule is one file and one row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from unisono import rules
from unisono.registry import Registry
from unisono.rules import RULES, LocalSGD, all_options, own_options
from unisono.tables import number


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


def test_of_two_rules_with_the_same_key_the_one_that_is_named_has_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", Registry("rule", {**RULES, "seldom": f"{__name__}:Seldom"}))
    assert all_options("seldom")["every"].default == 99
    assert all_options("bsp")["every"].default == 16
    assert all_options("bsp")["shyness"].default == 0.5
