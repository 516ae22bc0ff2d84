"""Runs the tests in tests/mpi on real ranks, for as long as they make progress: rank 0 prints a dot a test.

On 1, 2, 3 and 4 ranks what depends on their number: who exchanges what with whom. What stands on that is tested on 1, 2
and 3 ranks, and what sees a rank and others alone, on 1 and 3.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

MPI_TESTS = Path(__file__).parent / "mpi"

NOT_ON_FOUR = ("data", "engine", "gradients", "torch_backend", "training", "tuning")
"""What 4 ranks would do as 3 do, by collectives that are tested on 4. Process groups of 4 have programs of their own in
tests/torch_backend."""

NOT_ON_TWO = (
    "data",
    "engine/test_store.py",
    "gradients/test_step.py",
    "torch_backend/test_direct.py",
    "training",
    "tuning",
)
"""What 2 ranks would do as 3 do: they see that there are others, and that shares are uneven."""

LEFT_OUT = {1: (), 2: NOT_ON_TWO, 3: (), 4: NOT_ON_FOUR}


@pytest.mark.parametrize("ranks", LEFT_OUT)
def test_on_ranks(mpiexec: Callable[..., subprocess.CompletedProcess[str]], ranks: int) -> None:
    left_out = [f"--ignore={MPI_TESTS / name}" for name in LEFT_OUT[ranks]]
    done = mpiexec(ranks, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(MPI_TESTS), *left_out)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    passed = [int(count) for count in re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)]
    assert passed, done.stdout
    assert passed[0] > 50, "the tests were not collected"


def test_what_is_left_out_exists() -> None:
    assert all((MPI_TESTS / name).exists() for names in LEFT_OUT.values() for name in names)
