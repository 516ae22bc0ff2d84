"""Resources of a group are freed when all its ranks have ended it; with one rank, at once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from unisono.mpi import MPI
from unisono.torch_backend.mpi_job import Retirement


def test_a_group_of_one_rank_is_freed_at_once() -> None:
    comm, freed = MPI.COMM_SELF.Dup(), list[str]()
    Retirement().retire(comm, lambda: freed.append("all"))
    assert freed == ["all"]
    comm.Free()


def test_several_groups_one_after_another() -> None:
    retirement, freed = Retirement(), list[int]()
    comms = [MPI.COMM_SELF.Dup() for _ in range(3)]
    for index, comm in enumerate(comms):
        retirement.retire(comm, lambda index=index: freed.append(index))
    retirement.close()
    assert freed == [0, 1, 2]
    for comm in comms:
        comm.Free()


def test_a_group_beside_a_default_group_of_another_backend(
    mpiexec: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text(
        "import torch, torch.distributed as dist, unisono\nworld = unisono.init()\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=1 - world.rank, world_size=2)\n"
        "ours = dist.new_group(backend='unisono')\n"
        "single = [dist.new_group([rank], backend='unisono') for rank in (0, 1)]\n"
        "out = [torch.empty(1) for _ in range(2)]\n"
        "dist.all_gather(out, torch.full((1,), float(dist.get_rank())), group=ours)\n"
        "assert [int(each) for each in out] == [0, 1], out\n"
        "dist.all_reduce(torch.ones(1), group=single[dist.get_rank()])\ndist.destroy_process_group()\n"
    )
    done = mpiexec(2, str(tmp_path / "beside.py"))
    assert done.returncode == 0, done.stderr


def test_a_rank_that_ends_its_group_after_another_has_left(
    mpiexec: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(
        "import time, torch, torch.distributed as dist, unisono\ndist.init_process_group('unisono')\n"
        "dist.all_reduce(torch.ones(1000))\nif dist.get_rank() == 0:\n    time.sleep(4)\n"  # the other waits for 1 s
        "dist.destroy_process_group()\n"
    )
    done = mpiexec(2, str(tmp_path / "late.py"))
    assert done.returncode == 0, done.stderr
