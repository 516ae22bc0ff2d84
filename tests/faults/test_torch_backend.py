"""A rank that fails in the midst of DistributedDataParallel's backward pass ends all, soon, and is named."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "ddp_fails.py"

NAMED = {
    "raise": "rank 1 of 4: ValueError: a value of rank 1",
    "exit": "unisono: rank 1 of 4",
    "kill": "unisono: rank 1 of 4",
    "leave": "rank 1 has ended its program",
}


@pytest.mark.parametrize("how", NAMED)
def test_a_rank_that_fails_in_the_backward_pass(
    mpiexec: Callable[..., subprocess.CompletedProcess[str]], how: str
) -> None:
    started = time.monotonic()
    done = mpiexec(4, str(PROGRAM), how, timeout=90)
    assert done.returncode != 0
    assert done.stdout.count("begun") == 4
    assert NAMED[how] in done.stderr
    assert time.monotonic() - started < 10 + 20, "10 s to end, after what starting 4 ranks of PyTorch may take here"
