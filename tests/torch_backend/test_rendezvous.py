"""Where the ranks of one node meet: in memory, whatever sets an address; nothing listens, nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.progress import Run

from unisono.launch import on_one_node

PROGRAM = """
import os, sys
from mpi4py import MPI

def listening():
    # by inode: what this process listens on, of TCP
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    found = set()
    for family in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{family}").read().splitlines()[1:]:
            part = line.split()
            if part[3] == "0A" and f"socket:[{part[9]}]" in own:
                found.add(part[1])
    return found

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
addressed = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK=str(rank), WORLD_SIZE=str(size))
os.environ.update(addressed)
before = listening()  # the MPI library's own
import torch, torch.distributed as dist, unisono
for turn in range(4):
    if turn == 2:
        for name in addressed:
            del os.environ[name]
    dist.init_process_group("unisono")
    total = torch.ones(3)
    dist.all_reduce(total)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(total, group=pair)
    every = [None] * size
    dist.all_gather_object(every, rank)
    assert every == list(range(size))
    assert listening() == before, listening() - before
    dist.destroy_process_group()
links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
assert sum("unisono-store" in link for link in links) == 1, links
model = unisono.parallel(torch.nn.Linear(2, 2), unisono.init())
model(torch.ones(1, 2)).sum().backward()
assert listening() == before, listening() - before
sys.stdout.write(f"rank {rank} fine\\n")
"""


def files() -> set[str]:
    return {path.name for folder in ("/tmp", "/dev/shm") for path in Path(folder).iterdir() if "unisono" in path.name}


def test_nothing_listens_on_one_node_whether_an_address_is_set_or_not(mpiexec: Run) -> None:
    before = files()
    done = mpiexec(2, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 fine", "rank 1 fine"]
    assert files() <= before


@pytest.mark.parametrize(
    ("environment", "here"),
    [
        ({}, False),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, True),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, False),
        ({"PMI_SIZE": "4"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}, False),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"}, True),
    ],
)
def test_launchers_that_started_all_ranks_on_this_node(environment: dict[str, str], here: bool) -> None:
    assert on_one_node(environment) == here
