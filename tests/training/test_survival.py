"""Rules whose other ranks can go on after a death: those of the table, and the user's own, made in another process."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from unisono.rules import RULES, find_rule
from unisono.rules.asynchronous import has_servers
from unisono.training.recipe import RuleRecipe
from unisono.training.survival import survives_deaths


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
    commands, train = [], import_module("unisono.cli.train")

    def started(command: list[str], **_: object) -> None:
        commands.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "survival_options", lambda _: ("--with-ft", "ulfm"))
    monkeypatch.setattr(train.subprocess, "Popen", started)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        train.launch(2, ["train"], survives=None if survives is None else lambda: survives)
    assert ("--with-ft" in commands[0]) is bool(survives)
