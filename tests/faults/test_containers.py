"""Ranks in a container that refuses to copy other processes' memory, or hides a rank's: results are right."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import progress
from tests.faults.restricted import SYSTEM_CALLS
from tests.faults.test_shared_memory import PRIVATE, needs_mount

from unisono.launch import find_mpiexec, launch_environment

HERE = Path(__file__).parent
PROGRAM = [str(HERE / "in_a_container.py"), str(1 << 20)]
UNPRIVILEGED = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
"""Command that runs another without the right to access any process's memory."""

pytestmark = [
    needs_mount,
    pytest.mark.launches,
    pytest.mark.skipif(platform.machine() not in SYSTEM_CALLS, reason="numbers of system calls are not known here"),
]


def refused(what: str) -> list[str]:
    return [sys.executable, str(HERE / "restricted.py"), what, *PROGRAM]


def run(prefix: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ranks whose /dev/shm has 64 MB, as in a container of Docker."""
    shell = [*PRIVATE, "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh", *prefix]
    return progress.run([*shell, str(find_mpiexec()), *arguments], env=launch_environment(os.environ, terminal=False))


def test_4_ranks_that_may_not_copy_each_others_memory() -> None:
    """Which have less memory than their slots would take: 24 MB, and at most a quarter of what is free."""
    done = run([], "-n", "4", *refused("read"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} fine, does not read" for rank in range(4)]
    assert done.stderr.count("--shm-size=1g") == 1, "said once"


@pytest.mark.skipif(shutil.which(UNPRIVILEGED[0]) is None, reason="there is no setpriv")
def test_a_rank_that_may_not_be_read() -> None:
    done = run(UNPRIVILEGED, "-n", "2", sys.executable, *PROGRAM, ":", "-n", "1", *refused("being-read"))
    assert done.returncode == 0, done.stderr
    fine = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))  # UCX writes there, too
    assert fine == [f"rank {rank} fine, does not read" for rank in range(3)]
