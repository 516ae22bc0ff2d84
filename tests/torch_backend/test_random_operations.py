"""Random operations on random subsets of four ranks, many in flight; the same program does 10,000 for the record."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path


def test_random_operations(mpiexec: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    program = Path(__file__).parent / "random_operations.py"
    done = mpiexec(4, str(program), "400")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("400 operations are right")
