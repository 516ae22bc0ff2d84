"""Runs the tests in tests/mpi on real ranks, for as long as they make progress: rank 0 prints a dot a test.

On 3 ranks only what depends on the number of ranks; the rest, which sees a rank and others, runs on 1, 2 and 4.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

MPI_TESTS = Path(__file__).parent / "mpi"

NOT_ON_THREE = (
    "engine/test_store.py",
    "gradients/test_step.py",
    "torch_backend/test_direct.py",
    "training/test_run.py",
    "training/test_trainer.py",
    "tuning/test_tune.py",
)
"""What 3 ranks would do as 2 and 4 do."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_ranks(mpiexec: Callable[..., subprocess.CompletedProcess[str]], ranks: int) -> None:
    left_out = [f"--ignore={MPI_TESTS / name}" for name in NOT_ON_THREE if ranks == 3]
    done = mpiexec(ranks, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(MPI_TESTS), *left_out)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    passed = [int(count) for count in re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)]
    assert passed, done.stdout
    assert passed[0] > 50, "the tests were not collected"


def test_what_is_left_out_exists() -> None:
    assert all((MPI_TESTS / name).is_file() for name in NOT_ON_THREE)
