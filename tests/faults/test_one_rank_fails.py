"""A rank that fails ends all, with an exit code that is not 0, and nothing is left behind.

The others would sum for ever, in silence: that they do not end is told by the limit on the time without output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.progress import Watched, poll_until, run

from unisono.launch import find_mpiexec

Run = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.launches  # alone: beside others, their files in /dev/shm would be seen

START = """
import os, sys, time, torch, unisono
world = unisono.init(); x = torch.ones(300_000); world.allreduce(x)
"""
REST = "\nwhile True: world.allreduce(x)"


def left_behind() -> set[str]:
    found = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("mpich_")}
    return found | {path.name for path in Path("/tmp").iterdir() if path.name.startswith("hydra_hwloc_")}


def started() -> Watched:
    """Two ranks that sum until they are ended, and have begun."""
    program = START + "print('begun', flush=True)" + REST
    watched = Watched([str(find_mpiexec()), "-n", "2", sys.executable, "-c", program])
    watched.until(lambda: watched.stdout.count("begun") == 2)
    return watched


@pytest.mark.parametrize("rank", [0, 2])
def test_an_uncaught_exception(mpiexec: Run, rank: int) -> None:
    before = left_behind()
    fail = f"world.rank == {rank} and [][5]"
    done = mpiexec(3, "-c", START + fail + REST)
    assert done.returncode == 1
    assert f"rank {rank} of 3: IndexError: list index out of range" in done.stderr
    assert f"rank {rank} of 3: Traceback" in done.stderr
    assert left_behind() <= before


def test_a_rank_that_is_killed(mpiexec: Run) -> None:
    before = left_behind()
    done = mpiexec(3, "-c", START + "world.rank == 1 and os.kill(os.getpid(), 9)" + REST)
    assert done.returncode != 0
    assert left_behind() <= before


def test_all_killed_at_once() -> None:
    before = left_behind()
    with started() as watched:
        os.killpg(watched.process.pid, signal.SIGKILL)
        assert watched.finish().returncode == -signal.SIGKILL
    assert poll_until(left_behind, lambda seen: seen <= before) <= before


def test_an_error_of_one_rank_is_told_with_the_rank(mpiexec: Run) -> None:
    code = """
from unisono.errors import RecipeError
with world.agree_on_errors():
    if world.rank == 1:
        raise RecipeError("not here")
    while True: world.allreduce(x)
"""
    done = mpiexec(2, "-c", START + "pass\n" + code)
    assert done.returncode == 2
    assert "unisono: rank 1: not here" in done.stderr


def test_a_launcher_of_another_mpi_is_noticed() -> None:
    command = [sys.executable, "-c", "import unisono; unisono.init()"]
    done = run(command, env={**os.environ, "OMPI_COMM_WORLD_SIZE": "4"})
    assert done.returncode == 1
    assert "4 ranks were started, but this MPI library sees 1" in done.stderr


def test_the_launcher_is_killed() -> None:
    before = left_behind()
    with started() as watched:
        watched.process.kill()
        assert watched.finish().returncode == -signal.SIGKILL
    assert poll_until(left_behind, lambda seen: seen <= before) <= before


@pytest.mark.parametrize(
    ("one", "other", "ranks"), [("library", "ring", 2), ("ring", "library", 2), ("hierarchical", "library", 4)]
)
def test_ranks_that_differ_inside_the_library_are_told_and_ended(
    mpiexec: Run, one: str, other: str, ranks: int
) -> None:
    """On two nodes, of one rank or of two."""
    program = f"""
import torch, unisono
from unisono.placement import place
from unisono.world import World
world = unisono.init()
spread = World(world.comm.Dup(), place([2 * rank // world.size for rank in range(world.size)]), world.table)
spread.allreduce(torch.zeros(30_000), {other!r} if world.rank == world.size - 1 else {one!r})
"""
    done = mpiexec(ranks, "-c", program)
    assert done.returncode != 0
    assert f"allreduce(30000 x float32, {one})" in done.stderr
    assert f"allreduce(30000 x float32, {other})" in done.stderr
    assert "MismatchError" in done.stderr
