"""Rules that recipes name: their keys, and the keys that have no effect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unisono.cli import ranks
from unisono.rules import RULES, DiLoCo, Exchange, find_rule
from unisono.rules.asynchronous import has_servers
from unisono.training.named_rule import describe_unused, named_rule, survives_deaths
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


def test_rules_of_the_table() -> None:
    assert {name for name in RULES if survives_deaths(RuleRecipe(name))} == {"easgd"}
    assert {name for name in RULES if has_servers(find_rule(name)())} == {"easgd"}


def test_rules_of_ones_own_are_asked_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "own_survivors.py").write_text(
        "from unisono.rules import BSP, EASGD\n"
        "def calm(exchange, overlap):\n    print('made')\n    return EASGD(exchange, overlap)\n"
        "def strict(exchange, overlap):\n    return BSP(exchange, overlap)\n"
        "def broken(exchange, overlap):\n    raise ValueError\n"
    )
    asked = {
        name: survives_deaths(RuleRecipe(f"own_survivors:{name}", str(tmp_path)))
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

    monkeypatch.setattr(ranks, "survival_options", lambda _: ("--with-ft", "ulfm"))
    monkeypatch.setattr(ranks.subprocess, "Popen", started)
    monkeypatch.setattr(ranks.signal, "signal", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        ranks.launch(2, survives=None if survives is None else lambda: survives)
    assert ("--with-ft" in commands[0]) is bool(survives)
