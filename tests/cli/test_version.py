"""The command `unisono` itself."""

from __future__ import annotations

from tests.progress import Run


def test_version(command: Run) -> None:
    done = command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "unisono 0.1.0\n", "")


def test_commands_are_listed(command: Run) -> None:
    done = command()
    for name in ("train", "pack", "draw", "accuracy", "tune", "layers", "bench", "data", "lab"):
        assert f" {name} " in done.stdout + done.stderr
