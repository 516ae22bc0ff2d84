"""A rank that fails ends all, with an exit code that is not 0, and nothing is left behind.

The others would sum for ever, in silence: that they do not end is told by the limit on the time without output.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.progress import Run, Watched, poll_until, process_tree, run

from unisono.launch import find_mpiexec

pytestmark = pytest.mark.launches

START = """
import os, sys, time, torch, unisono
world = unisono.init(); x = torch.ones(300_000); world.allreduce(x)
"""
REST = "\nwhile True: world.allreduce(x)"


def unused_files() -> set[str]:
    """MPICH's files that no process has mapped. Other jobs have files too: those are mapped, or vanish."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended, or is another user's
            mapped += "".join(line for line in maps.open(errors="replace") if "mpich_" in line)
    names = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("mpich_")}
    names |= {path.name for path in Path("/tmp").iterdir() if path.name.startswith("hydra_hwloc_")}
    return {name for name in names if name not in mapped}


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Files that are new after a test, whose processes have ended, vanish."""
    before = unused_files()
    yield
    new = unused_files() - before
    assert not poll_until(lambda: new & unused_files(), lambda left: not left)


def have_ended(processes: Iterable[int]) -> bool:
    """Return whether all processes end: whatever they write and map goes with them."""
    existing = lambda: [process for process in processes if Path(f"/proc/{process}/exe").exists()]  # noqa: E731 - a zombie has none
    return not poll_until(existing, lambda left: not left)


def started() -> Watched:
    """Two ranks that sum until they are ended, and have begun."""
    program = START + "print('begun', flush=True)" + REST
    watched = Watched([str(find_mpiexec()), "-n", "2", sys.executable, "-c", program])
    watched.until(lambda: watched.stdout.count("begun") == 2)
    return watched


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_uncaught_exception(mpiexec: Run, rank: int) -> None:
    fail = f"world.rank == {rank} and [][5]"
    done = mpiexec(2, "-c", START + fail + REST)
    assert done.returncode == 1
    assert f"rank {rank} of 2: IndexError: list index out of range" in done.stderr
    assert f"rank {rank} of 2: Traceback" in done.stderr


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_rank_that_is_killed(mpiexec: Run) -> None:
    done = mpiexec(2, "-c", START + "world.rank == 1 and os.kill(os.getpid(), 9)" + REST)
    assert done.returncode != 0


TABLE = """
[[allreduce]]
where = "one node"
algorithm = "direct"
transport = "cma"
"""


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_killed_while_others_copy_its_memory(
    mpiexec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    (tmp_path / "table.toml").write_text(TABLE)
    monkeypatch.setenv("UNISONO_TABLE", str(tmp_path / "table.toml"))
    kill = "import threading; world.rank == 1 and threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()"
    done = mpiexec(ranks, "-c", START.replace("300_000", "10_000_000") + kill + REST)
    assert done.returncode != 0
    assert "rank 1" in done.stderr


@pytest.mark.usefixtures("nothing_left_behind")
def test_all_killed_at_once() -> None:
    with started() as watched:
        processes = process_tree(watched.process.pid)
        os.killpg(watched.process.pid, signal.SIGKILL)
        assert watched.finish().returncode == -signal.SIGKILL
    assert have_ended(processes)


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


@pytest.mark.usefixtures("nothing_left_behind")
def test_the_launcher_is_killed() -> None:
    with started() as watched:
        processes = process_tree(watched.process.pid)
        watched.process.kill()
        assert watched.finish().returncode == -signal.SIGKILL
    assert have_ended(processes)


@pytest.mark.parametrize(
    ("algorithm", "other", "ranks"), [("library", "ring", 2), ("ring", "library", 2), ("hierarchical", "library", 4)]
)
def test_ranks_that_differ_inside_the_library_are_told_and_ended(
    mpiexec: Run, algorithm: str, other: str, ranks: int
) -> None:
    """On two nodes, of one rank or of two."""
    program = f"""
import torch, unisono
from unisono.placement import place
from unisono.world import World
world = unisono.init()
spread = World(world.comm.Dup(), place([2 * rank // world.size for rank in range(world.size)]), world.table)
spread.allreduce(torch.zeros(30_000), {other!r} if world.rank == world.size - 1 else {algorithm!r})
"""
    done = mpiexec(ranks, "-c", program)
    assert done.returncode != 0
    assert f"allreduce(30000 x float32, {algorithm})" in done.stderr
    assert f"allreduce(30000 x float32, {other})" in done.stderr
    assert "MismatchError" in done.stderr
