"""`make test` runs both halves of the tests, and fails if either did; another PyTorch has an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PYTHON = """#!/bin/sh
echo "$@" >> {log}
echo "${{PYTHONDONTWRITEBYTECODE-none}}" > {log}.bytecode
case "$*" in *"{fails}"*) exit 1;; esac
"""


@pytest.mark.parametrize(
    ("fails", "code"), [("-m not launches", 2), ("-m launches", 2), ("pytest", 2), ("no such text", 0)]
)
def test_a_half_that_fails_does_not_hide_the_other(fails: str, code: int, tmp_path: Path) -> None:
    python, log = tmp_path / "bin" / "python", tmp_path / "log"
    python.parent.mkdir()
    python.write_text(PYTHON.format(log=log, fails=fails))
    python.chmod(0o755)
    make = ["make", "test", f"VENV={tmp_path}", "-o", f"{tmp_path}/.dev"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stderr
    assert log.with_suffix(".bytecode").read_text() == "none\n", "modules are compiled by each process"
    assert log.read_text().splitlines() == [
        "-m pytest -q --durations=50 -n 3 --dist worksteal -m not launches",
        "-m pytest -q --durations=50 -n 2 --dist loadfile --no-loadscope-reorder -m launches",
    ]


def test_what_the_quick_tests_leave_out_exists() -> None:
    done = subprocess.run(["make", "--dry-run", "test-quick"], cwd=ROOT, capture_output=True, text=True, check=True)
    left_out = re.findall(r"--ignore=(\S+)", done.stdout)
    assert left_out
    assert all((ROOT / path).exists() for path in left_out)


def test_another_pytorch_has_constraints_and_an_environment_of_its_own() -> None:
    make = ["make", "--dry-run", "test", "TORCH=1.2.3"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "s/^torch==.*/torch==1.2.3/" in done.stdout
    for line in done.stdout.splitlines():
        assert ".venv/" not in line
        assert "pip install" not in line or "-c .venv-torch-1.2.3/.constraints" in line
