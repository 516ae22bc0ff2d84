"""A rank that fails in the midst of DistributedDataParallel's backward pass ends all, and is named."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "ddp_fails.py"

NAMED = {
    "raise": "rank 1 of {}: ValueError: a value of rank 1",
    "exit": "unisono: rank 1 of {}",
    "kill": "unisono: rank 1 of {}",
    "leave": "missing: rank 1, which has ended its program",
    "leave the other waiting for a message": "recv from rank 1, tag 0, group 0: rank 1 has ended its program",
}


@pytest.mark.parametrize("how", NAMED)
def test_a_rank_that_fails_in_the_backward_pass(
    mpiexec: Callable[..., subprocess.CompletedProcess[str]], how: str
) -> None:
    ranks = 4 if how == "exit" else 2  # after os._exit(0) hydra may give 0 where there are fewer
    done = mpiexec(ranks, str(PROGRAM), how)
    assert done.returncode != 0
    assert done.stdout.count("begun") == ranks
    assert NAMED[how].format(ranks) in done.stderr
