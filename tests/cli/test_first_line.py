"""What a command shows before its ranks have imported anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from unisono.cli.ranks import StartSign
from unisono.formats import counted
from unisono.launch import cores, launch_environment

LAUNCHED = """
import sys
from unisono.cli import main, train

def launch(ranks, *more, **named):
    print(ranks, [name for name in ("torch", "mpi4py") if name in sys.modules])
    return 0

sys.modules["unisono.cli.train"].launch = launch
sys.argv = ["unisono", "train", "digits", *sys.argv[1:]]
main()
"""


def launched(*arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", LAUNCHED, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_first_line_comes_before_pytorch_and_mpi_are_imported() -> None:
    first, second = launched("--ranks", "3", "--verbose")
    assert first.removesuffix(f", which take turns on {cores()} cores") == "digits: training on 3 ranks of this machine"
    assert second == "3 []"


def test_more_ranks_than_cores_are_told_before_they_start() -> None:
    crowd = f"digits: training on {cores() + 1} ranks of this machine, which take turns on {counted(cores(), 'core')}"
    assert launched("--ranks", str(cores() + 1))[0] == crowd


def test_sigterm_before_the_first_step_is_answered_by_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unisono", "train", "digits", "--ranks=1", "--run=mine"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = launch_environment(os.environ, terminal=False)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stdout.readline() == "digits: training on 1 rank of this machine\n"
        process.terminate()
        _, said = process.communicate()
    assert said == "unisono: SIGTERM before the first step or after the last: nothing is saved\n"
    assert process.returncode == -signal.SIGTERM
    assert not (tmp_path / "mine").exists()


def test_a_sign_counts_the_seconds_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with closing(StartSign(2)) as sign:
        for now[0] in (5.0, 5.5, 7.0):
            sign.show()
        sign.close()
        sign.show()
    assert capsys.readouterr().out == "starting 2 ranks: 0 s\rstarting 2 ranks: 2 s\r\x1b[K"


def test_a_pipe_gets_no_sign(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(StartSign(2)) as sign:
        sign.show()
    assert capsys.readouterr().out == ""
