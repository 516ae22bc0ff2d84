"""Rules that recipes name: their keys, and the keys that have no effect."""

from __future__ import annotations

import pytest

from unisono.rules import DiLoCo, Exchange
from unisono.training.named_rule import describe_unused, named_rule
from unisono.training.recipe import RuleRecipe


def test_a_rule_gets_its_own_keys() -> None:
    exchange = Exchange(wire="int8")
    found = named_rule(RuleRecipe("diloco", overlap="none", every=8, alpha=0.9), exchange)
    assert found == DiLoCo(exchange, "none", every=8)


def test_keys_that_a_rule_has_not_are_named() -> None:
    assert describe_unused(RuleRecipe("bsp", alpha=0.9, servers=2, scale="sum", overlap="none")) == [
        "rule.alpha = 0.9 has no effect with rule.name = 'bsp', which has scale",
        "rule.servers = 2 has no effect with rule.name = 'bsp', which has scale",
    ]
    assert describe_unused(RuleRecipe("local_sgd", delay=0)) == [
        "rule.delay = 0 has no effect with rule.name = 'local_sgd', which has every"
    ]
    assert describe_unused(RuleRecipe("mine:make", "/home", every=4)) == [
        "rule.every = 4 has no effect with rule.name = 'mine:make', which has no keys of its own"
    ]


@pytest.mark.parametrize(
    "options",
    [
        RuleRecipe(),
        RuleRecipe("easgd", alpha=0.9, period=2, server="thread", servers=2, staleness=4),
        RuleRecipe("diloco", every=8, outer_rate=0.5, outer_momentum=0.5, fragments=2, delay=2),
        RuleRecipe("local_sgd", every=8),
        RuleRecipe("mine:make", "/home", overlap="none"),
    ],
)
def test_keys_of_the_rule_and_defaults_are_not(options: RuleRecipe) -> None:
    assert describe_unused(options) == []
