"""Help of the command line, and completion of the shell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

from unisono.cli import PANELS, app

COMMANDS = sorted(function.__name__ for functions in PANELS.values() for function in functions)


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.output


def test_commands_are_in_groups() -> None:
    text = shown()
    places = [text.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    assert "─ Commands ─" not in text
    assert set(COMMANDS) | {"bench"} == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("bench", "networks")])
def test_a_flag_has_no_type(command: tuple[str, ...]) -> None:
    assert "bool" not in shown(*command)


def test_an_option_with_a_value_has_its_type() -> None:
    assert "<int>" in shown("train")


def test_the_shell_completes_commands() -> None:
    environment = {**os.environ, "_UNISONO_COMPLETE": "complete_bash", "COMP_WORDS": "unisono tra", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['unisono']; from unisono.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["train"], done.stderr
