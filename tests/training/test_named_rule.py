"""Rules that recipes name: their keys, and the keys that have no effect."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import ranks
from unisono.errors import RecipeError
from unisono.rules import BSP, RULES, DiLoCo, Exchange, LocalSGD, find_rule
from unisono.rules.asynchronous import has_servers
from unisono.training.recipe import ExchangeRecipe, Recipe, RuleRecipe
from unisono.training.recipe_check import describe_unused, describe_wire, make_rule, survives_deaths


def rule_recipe(name: str, folder: str = "", overlap: str = "auto", **options: Any) -> RuleRecipe:
    return RuleRecipe(name, folder, overlap, options)


def test_a_rule_gets_its_own_keys() -> None:
    recipe = rule_recipe("diloco", overlap="none", every=8, alpha=0.9, nesterov=False)
    rule = make_rule(Recipe(rule=recipe, exchange=ExchangeRecipe(wire="int8", bucket_megabytes=2)))
    assert rule == DiLoCo(Exchange(wire="int8", bucket_bytes=2 << 20), "none", every=8, nesterov=False)
    assert make_rule(Recipe(rule=rule_recipe("local_sgd", every=5))) == LocalSGD(every=5)


def test_a_rule_of_ones_own_is_made_by_its_function(tmp_path: Path) -> None:
    (tmp_path / "own_rule_made.py").write_text(
        "from unisono.rules import BSP\n"
        "def largest(exchange, overlap):\n    return BSP(exchange, overlap, 3)\n"
        "def none(exchange, overlap):\n    return 7\n"
    )
    options = RuleRecipe("own_rule_made:largest", str(tmp_path), "funnel")
    recipe = Recipe(rule=options, exchange=ExchangeRecipe(wire="float16"))
    assert make_rule(recipe) == BSP(Exchange(wire="float16"), "funnel", 3)
    with pytest.raises(RecipeError, match="'own_rule_made:none': it gave int, not a rule that inherits from"):
        make_rule(replace(recipe, rule=replace(options, name="own_rule_made:none")))


def test_keys_that_a_rule_has_not_are_named() -> None:
    assert describe_unused(rule_recipe("bsp", alpha=0.9, servers=2, scale="sum", overlap="none")) == [
        "rule.servers = 2 has no effect with rule.name = 'bsp', which has scale",
        "rule.alpha = 0.9 has no effect with rule.name = 'bsp', which has scale",
    ]
    assert describe_unused(rule_recipe("local_sgd", delay=0)) == [
        "rule.delay = 0 has no effect with rule.name = 'local_sgd', which has every"
    ]
    assert describe_unused(rule_recipe("mine:make", "/home", every=4)) == [
        "rule.every = 4 has no effect with rule.name = 'mine:make', which has no keys of its own"
    ]


@pytest.mark.parametrize(
    "options",
    [
        RuleRecipe(),
        rule_recipe("easgd", alpha=0.9, period=2, server="thread", servers=2, staleness=4),
        rule_recipe("diloco", every=8, outer_rate=0.5, outer_momentum=0.5, fragments=2, delay=2),
        rule_recipe("local_sgd", every=8),
        RuleRecipe("mine:make", "/home", overlap="none"),
    ],
)
def test_keys_of_the_rule_and_defaults_are_not(options: RuleRecipe) -> None:
    assert describe_unused(options) == []


@pytest.mark.parametrize(
    ("exchange", "nodes", "warning"),
    [
        ({"wire": "int8"}, 2, ""),
        ({}, 1, ""),
        ({"wire": "int8"}, 1, "exchange.wire = 'int8' has no effect with all ranks on one node, which share memory"),
        ({"wire": "int8", "algorithm": "library"}, 2, 'no effect with exchange.algorithm = "library"'),
    ],
)
def test_a_wire_without_effect_is_told(exchange: dict[str, str], nodes: int, warning: str) -> None:
    lines = describe_wire(Recipe(exchange=ExchangeRecipe(**exchange)), nodes)
    assert warning in "".join(lines)
    assert len(lines) == bool(warning)


def test_rules_of_the_table() -> None:
    assert {name for name in RULES if survives_deaths(Recipe(rule=RuleRecipe(name)))} == {"easgd"}
    assert {name for name in RULES if has_servers(find_rule(name)())} == {"easgd"}


def test_rules_of_ones_own_are_asked_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "own_survivors.py").write_text(
        "from unisono.rules import BSP, EASGD\n"
        "def calm(exchange, overlap):\n    print('made')\n    return EASGD(exchange, overlap)\n"
        "def strict(exchange, overlap):\n    return BSP(exchange, overlap)\n"
        "def broken(exchange, overlap):\n    raise ValueError\n"
    )
    asked = {
        name: survives_deaths(Recipe(rule=RuleRecipe(f"own_survivors:{name}", str(tmp_path))))
        for name in ("calm", "strict", "broken", "absent")
    }
    assert asked == {"calm": True, "strict": False, "broken": False, "absent": False}
    assert "own_survivors" not in sys.modules


@pytest.mark.parametrize("survives", [True, False, None])
def test_ranks_are_started_so_that_they_go_on(monkeypatch: pytest.MonkeyPatch, survives: bool | None) -> None:
    """With Open MPI's mpiexec, and a rule that can."""
    commands = []

    def started(command: list[str], **_: object) -> None:
        commands.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "is_open_mpi", lambda _: True)
    monkeypatch.setattr(ranks.subprocess, "Popen", started)
    monkeypatch.setattr(ranks.signal, "signal", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        ranks.launch(2, survives=None if survives is None else lambda: survives)
    assert ("--with-ft" in commands[0]) is bool(survives)
