"""Runs the tests in tests/mpi on real ranks, for as long as they make progress: rank 0 prints a dot a test.

On 1, 2, 3 and 4 ranks what depends on their number; what sees a rank and others alone, on 1 and 3.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

MPI_TESTS = Path(__file__).parent / "mpi"

ON_ONE_AND_THREE = (
    "data",
    "step/test_store.py",
    "reducer/test_step.py",
    "torch_backend/test_direct.py",
    "training",
    "tuning",
)
"""What 2 and 4 ranks would do as 3 do: they see that there are others, and that shares are uneven."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_ranks(mpiexec: Callable[..., subprocess.CompletedProcess[str]], ranks: int) -> None:
    left_out = [f"--ignore={MPI_TESTS / name}" for name in ON_ONE_AND_THREE if ranks in (2, 4)]
    done = mpiexec(ranks, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(MPI_TESTS), *left_out)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    passed = [int(count) for count in re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)]
    assert passed, done.stdout
    assert passed[0] > 50, "the tests were not collected"


def test_what_is_left_out_exists() -> None:
    assert all((MPI_TESTS / name).exists() for name in ON_ONE_AND_THREE)
