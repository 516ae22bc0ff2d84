"""Shared memory that is too small makes runs slower, with a line that says why; it ends none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import progress

from unisono.launch import find_mpiexec, launch_environment

PROGRAM = Path(__file__).with_name("shared_memory_is_full.py")
PRIVATE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


def run(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` on ranks whose /dev/shm has 64 MB, as in a container of Docker."""
    shell = [*PRIVATE, "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    command = [*shell, str(find_mpiexec()), "-n", str(ranks), sys.executable, *arguments]
    environment = launch_environment(os.environ, terminal=False)
    return progress.run(command, env=environment)


def own_shared_memory() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = [*PRIVATE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(not own_shared_memory(), reason="no /dev/shm of its own can be mounted here")


@needs_mount
@pytest.mark.parametrize(
    ("left", "reported"),
    [(6_000_000, ["smaller pieces"]), (300_000, ["messages instead"])],
)
def test_collectives_with_little_or_no_room(left: int, reported: list[str]) -> None:
    done = run(3, str(PROGRAM), str(left))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} fine" for rank in range(3)]
    lines = [line for line in done.stderr.splitlines() if line.startswith("unisono: /dev/shm")]
    for message in reported:
        assert sum(message in line for line in lines) == 1, "once"
    assert all("docker run --shm-size=1g" in line for line in lines)
