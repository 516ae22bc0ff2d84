"""What PyTorch builds on its collectives works over unisono: the program asserts it on every rank."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

PROGRAM = Path(__file__).parent / "stack.py"


def test_every_part(mpiexec: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = mpiexec(4, str(PROGRAM), str(tmp_path / "checkpoint"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["join", "mesh_of_two_dimensions", "distributed_checkpoint", "objects"]
