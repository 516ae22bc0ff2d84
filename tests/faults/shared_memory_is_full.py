"""Fills /dev/shm up to argv[1] bytes, then makes worlds and sums on all ranks; prints what was right."""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import unisono
from unisono.placement import place
from unisono.world import World

LEFT = int(sys.argv[1])
FILLER = Path("/dev/shm/filler")


def rows(ranks: int, length: int) -> list[torch.Tensor]:
    return [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]


def fill(world: World) -> None:
    if world.rank == 0:
        filesystem = os.statvfs("/dev/shm")
        with FILLER.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, filesystem.f_bavail * filesystem.f_frsize - LEFT))
    world.comm.Barrier()


def check(world: World) -> None:
    """Every collective against what one process makes of the same numbers."""
    for length in (3, 5000, 900_001):
        every = rows(world.size, length)
        expected = torch.stack(every).double().sum(0).float()
        for algorithm in ("auto", "ring", "direct", "hierarchical"):
            result = world.allreduce(every[world.rank].clone(), algorithm)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
            digests = world.all_gather_object(hashlib.sha256(result.numpy().tobytes()).hexdigest())
            assert len(set(digests)) == 1, "the same bits on all ranks"
        start, stop = length * world.rank // world.size, length * (world.rank + 1) // world.size
        shard = world.reduce_scatter(every[world.rank])
        torch.testing.assert_close(shard, expected[start:stop], rtol=1e-5, atol=1e-5)
        gathered = world.all_gather(shard, torch.empty(length))
        torch.testing.assert_close(gathered, expected, rtol=1e-5, atol=1e-5)
        rooted = every[world.rank].clone()
        world.reduce(rooted, 1)
        torch.testing.assert_close(rooted, expected if world.rank == 1 else every[world.rank], rtol=1e-5, atol=1e-5)
        assert torch.equal(world.broadcast(every[world.rank].clone(), 1), every[1])
        sends = [every[world.rank][: peer + 1] for peer in range(world.size)]
        receives = [torch.empty(world.rank + 1) for _ in range(world.size)]
        world.all_to_all_v(sends, receives)
        assert all(torch.equal(part, row[: world.rank + 1]) for part, row in zip(receives, every, strict=True))
    world.barrier()


world = unisono.init()
fill(world)
check(world)
gradients = world.empty(3_000_000, torch.float32)
gradients += world.rank
assert world.allreduce(gradients)[-1] == sum(range(world.size))
model = unisono.parallel(torch.nn.Linear(10, 10), world)
for _ in range(3):
    model.zero_grad()
    model(torch.ones(2, 10)).sum().backward()
assert model.weight.grad is not None
assert torch.equal(model.weight.grad, torch.full((10, 10), 2.0))
half = World(world.comm.Dup(), place([rank // 2 for rank in range(world.size)]), world.table)
check(half)
dist.init_process_group("unisono")
total = torch.ones(100_000)
dist.all_reduce(total)
assert total[0] == world.size
dist.destroy_process_group()
half.free()
world.comm.Barrier()
if world.rank == 0:
    FILLER.unlink()
sys.stdout.write(f"rank {world.rank} fine\n")
