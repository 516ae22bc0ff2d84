"""The command `unisono` itself."""

from __future__ import annotations

import sys

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono import cli


def test_version(command: Run) -> None:
    done = command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "unisono 0.1.0\n", "")


def test_commands_are_listed(command: Run) -> None:
    done = command()
    for name in ("train", "pack", "draw", "accuracy", "tune", "layers", "bench", "data", "lab"):
        assert f" {name} " in done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("train {}", "train digits --ranks 2 --run {}", "train digits --elastic --run {}", "run {}", "accuracy {}"),
        *("join {}", "plan --check {}", "pack {} p"),
    ],
)
def test_a_path_that_cannot_be_opened_gets_one_line(in_process: Run, command: str) -> None:
    assert_one_line_error(in_process(*command.format("x" * 300).split()), "File name too long")


def test_an_error_that_names_no_path_keeps_its_traceback(in_process: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("of a bug")

    monkeypatch.setattr(cli, "command", fail)
    with pytest.raises(OSError, match="of a bug"):
        in_process("train")


def test_modules_of_the_current_folder_are_found_last(in_process: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as with -P
    in_process("--version")
    assert sys.path[-1] == ""
    assert sys.path.count("") == 1
