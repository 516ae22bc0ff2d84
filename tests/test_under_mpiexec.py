"""Runs the tests in tests/mpi on real ranks, within a time limit."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

MPI_TESTS = Path(__file__).parent / "mpi"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_ranks(mpiexec: Callable[..., subprocess.CompletedProcess[str]], ranks: int) -> None:
    done = mpiexec(ranks, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(MPI_TESTS), timeout=400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    passed = [int(count) for count in re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)]
    assert passed, done.stdout
    assert passed[0] > 50, "the tests were not collected"
