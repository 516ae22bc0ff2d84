"""Nobody waits without a word: who has not come is named with what it does and where, and every wait ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests import progress

from unisono.launch import find_mpiexec, launch_environment

TIMEOUT = 2.5
"""Seconds; ranks in different calls are found after 2.0."""

START = f"""
import os, signal, sys, time, torch, unisono
from unisono.errors import StallError
from unisono.placement import place
from unisono.world import World
world = unisono.init()
spread = World(world.comm.Dup(), place([rank % 2 for rank in range(world.size)]), world.table, timeout={TIMEOUT})
x = torch.ones(3)
for each in (world, spread):
    each.allreduce(x)
"""


def run(program: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a program; that it ends at all is shown by the limit on the time without output."""
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, "-c", START + program]
    environment = launch_environment({**os.environ, "UNISONO_TIMEOUT": str(TIMEOUT)}, terminal=False)
    return progress.run(command, env=environment)


@pytest.mark.parametrize(
    ("world", "call", "ranks"),
    [("world", "allreduce(x)", 2), ("spread", "allreduce(x)", 2), ("world", "all_gather_object(1)", 3),
     ("spread", "split(0)", 2)],
)  # fmt: skip
def test_a_rank_that_ends_earlier(world: str, call: str, ranks: int) -> None:
    done = run(f"if world.rank == 0: {world}.{call}\n", ranks)
    assert done.returncode != 0
    assert f"rank 0 of {ranks} has waited" in done.stderr
    assert "missing: rank 1, which has ended its program" in done.stderr
    assert call.partition("(")[0] in done.stderr
    assert "<string>:11" in done.stderr
    assert "StallError" in done.stderr


@pytest.mark.parametrize("world", ["world", "spread"])
def test_a_rank_that_is_stopped(world: str) -> None:
    done = run(
        f"""
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    {world}.barrier()
except StallError as error:
    os.kill(world_pids[1], signal.SIGCONT)
    raise
""".replace("if world.rank == 1:", "world_pids = world.all_gather_object(os.getpid())\nif world.rank == 1:", 1)
    )
    assert done.returncode != 0
    assert "s in barrier(), call " in done.stderr
    state = "is stopped" if world == "world" else "does not respond"
    assert f"missing: rank 1, which {state}" in done.stderr
    assert "rank 0 of 2: unisono.errors.StallError: rank 0 of 2 has waited" in done.stderr


def test_ranks_that_wait_for_each_other_in_two_worlds() -> None:
    done = run("""
one, two = world.dup(), world.dup()
if world.rank:
    one.barrier()
else:
    two.barrier()
""")
    assert done.returncode != 0
    first, second = (f"barrier(), call 1 of dup ({index}) of world" for index in (1, 2))
    assert f"in {second}, at <string>:16; missing: rank 1, which waits in {first}, at <string>:14" in done.stderr
    assert f"in {first}, at <string>:14; missing: rank 0, which waits in {second}, at <string>:16" in done.stderr
    assert "StallError" in done.stderr


def test_a_rank_that_computes_for_too_long() -> None:
    done = run("""
if world.rank == 1:
    time.sleep(600)
try:
    spread.allreduce(x, "ring")  # the library would hold the rank
except StallError:
    try:
        spread.barrier()  # such a world is not used again
    except StallError as error:
        print("caught", error, file=sys.stderr, flush=True)
        world.abort(7)
""")
    assert done.returncode == 7
    assert "missing: rank 1, which computes, at <string>:13" in done.stderr
    assert "caught rank 0 of 2 has waited" in done.stderr


def test_a_rank_that_the_library_holds_ends_all() -> None:
    done = run("""
if world.rank == 0:
    spread.allreduce(x, "library")
else:
    time.sleep(600)
""")
    assert done.returncode != 0
    assert "StallError: rank 0 of 2 has waited" in done.stderr
    assert "missing: rank 1, which computes, at <string>:15" in done.stderr


@pytest.mark.parametrize("end", ["sys.exit(3)", "world.free(); spread.free()"])
def test_a_program_that_ends_in_order_ends_at_once(end: str) -> None:
    done = run(end)
    assert done.returncode == (3 if end == "sys.exit(3)" else 0)
    assert "unisono" not in done.stderr


def test_a_time_out_that_is_no_time_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import unisono; unisono.init()"],
        capture_output=True,
        text=True,
        env={**launch_environment(os.environ, terminal=False), "UNISONO_TIMEOUT": "soon"},
        check=False,
    )
    assert "UsageError: UNISONO_TIMEOUT = soon; it must be a number of seconds" in done.stderr
