"""A rank that fails ends all, soon, with an exit code that is not 0, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.launch import find_mpiexec

Run = Callable[..., subprocess.CompletedProcess[str]]

START = """
import os, sys, threading, time, torch, unisono
world = unisono.init(); x = torch.ones(300_000); world.allreduce(x)
"""
REST = "\nwhile True: world.allreduce(x)"


def left_behind() -> set[str]:
    found = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("mpich_")}
    return found | {path.name for path in Path("/tmp").iterdir() if path.name.startswith("hydra_hwloc_")}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("where", ["main", "thread"])
def test_an_uncaught_exception(mpiexec: Run, rank: int, where: str) -> None:
    before = left_behind()
    fail = f"world.rank == {rank} and [][5]"
    if where == "thread":
        fail = f"threading.Thread(target=lambda: {fail}).start()"
    started = time.monotonic()
    done = mpiexec(3, "-c", START + "began = time.monotonic(); " + fail + REST, timeout=30)
    assert done.returncode == 1
    assert f"rank {rank} of 3: IndexError: list index out of range" in done.stderr
    assert f"rank {rank} of 3: Traceback" in done.stderr
    assert time.monotonic() - started < 5 + 10, "5 s to end, after what starting 3 ranks of PyTorch may take here"
    assert left_behind() <= before


def test_a_rank_that_is_killed(mpiexec: Run) -> None:
    before = left_behind()
    done = mpiexec(3, "-c", START + "world.rank == 1 and os.kill(os.getpid(), 9)" + REST, timeout=30)
    assert done.returncode != 0
    assert left_behind() <= before


def test_all_killed_at_once() -> None:
    before = left_behind()
    command = [str(find_mpiexec()), "-n", "2", sys.executable, "-c", START + "print('go', flush=True)" + REST]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    for _ in range(100):
        if left_behind() <= before:
            break
        time.sleep(0.1)
    assert left_behind() <= before


def test_an_error_of_one_rank_is_told_with_the_rank(mpiexec: Run) -> None:
    code = """
from unisono.errors import RecipeError
with world.agreeing():
    if world.rank == 1:
        raise RecipeError("not here")
    while True: world.allreduce(x)
"""
    done = mpiexec(2, "-c", START + "pass\n" + code, timeout=30)
    assert done.returncode == 2
    assert "unisono: rank 1: not here" in done.stderr


def test_a_launcher_of_another_mpi_is_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import unisono; unisono.init()"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMPI_COMM_WORLD_SIZE": "4"},
        check=False,
    )
    assert done.returncode == 1
    assert "4 ranks were started, but this MPI library sees 1" in done.stderr


def test_the_launcher_is_killed() -> None:
    before = left_behind()
    command = [str(find_mpiexec()), "-n", "2", sys.executable, "-c", START + "print('started', flush=True)" + REST]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "started" in process.stdout.readline()  # two ranks write: their lines may run into one
        process.kill()
    give_up = time.monotonic() + 20
    while left_behind() - before and time.monotonic() < give_up:
        time.sleep(0.1)
    assert left_behind() <= before


@pytest.mark.parametrize(("one", "other"), [("library", "ring"), ("ring", "library"), ("hierarchical", "library")])
def test_ranks_that_differ_inside_the_library_are_told_and_ended(mpiexec: Run, one: str, other: str) -> None:
    program = f"""
import torch, unisono
from unisono.placement import place
from unisono.world import World
world = unisono.init()
spread = World(world.comm.Dup(), place([rank // 2 for rank in range(world.size)]), world.table)
spread.allreduce(torch.zeros(30_000), {other!r} if world.rank == 3 else {one!r})
"""
    done = mpiexec(4, "-c", program, timeout=60)
    assert done.returncode != 0
    assert f"allreduce(30000 x float32, {one})" in done.stderr
    assert f"allreduce(30000 x float32, {other})" in done.stderr
    assert "MismatchError" in done.stderr
