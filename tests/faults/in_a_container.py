"""Checks every collective from 4 B to 64 MiB, DistributedDataParallel and unisono.parallel; prints what is right.

python in_a_container.py MOST_BYTES
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.world import World

MOST_BYTES = int(sys.argv[1])


def payload(rank: int, length: int) -> torch.Tensor:
    """Whole numbers, whose sums are exact in float32."""
    return torch.arange(length, dtype=torch.float32) % 251 + rank


def check(world: World, length: int) -> None:
    """Every collective of `length` numbers, against the numbers of all ranks."""
    rank, ranks, full = world.rank, world.size, payload(0, length)
    start, stop = length * rank // ranks, length * (rank + 1) // ranks
    total = ranks * full + sum(range(ranks))
    assert torch.equal(world.allreduce(payload(rank, length)), total)
    assert torch.equal(world.reduce_scatter(payload(rank, length)), total[start:stop])
    assert torch.equal(world.all_gather(full[start:stop].clone(), torch.empty(length)), full)
    assert torch.equal(world.broadcast(payload(rank, length), ranks - 1), payload(ranks - 1, length))
    mine = payload(rank, length)
    world.reduce(mine, 1)
    assert torch.equal(mine, total if rank == 1 else payload(rank, length))
    if length % ranks == 0:
        rows = torch.cat([payload(peer, length)[start:stop] for peer in range(ranks)])
        assert torch.equal(world.all_to_all(payload(rank, length)), rows)


def gradient(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return the gradient of a linear layer's weight, after three steps on inputs of this rank's number."""
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 300), float(rank))).sum().backward()
    weight = next(model.parameters())
    assert weight.grad is not None
    return weight.grad


world = unisono.init()
lengths = [1, world.size, 30, 1003, 8 << 10, (256 << 10) // 4, (1 << 20) + 3, MOST_BYTES // 4]
for length in lengths:
    if 4 * length <= MOST_BYTES:
        check(world, length)
window = world.empty(100_003, torch.float32)
window += world.rank
assert world.allreduce(window).eq(sum(range(world.size))).all()
mean = torch.full((300, 300), 2 * (world.size - 1) / 2)
assert torch.equal(gradient(unisono.parallel(torch.nn.Linear(300, 300), world), world.rank), mean)
dist.init_process_group("unisono")
assert torch.equal(gradient(DistributedDataParallel(torch.nn.Linear(300, 300)), world.rank), mean)
dist.destroy_process_group()
readable = world.reads_other_processes()
sys.stdout.write(f"rank {world.rank} fine, {'reads' if readable else 'does not read'}\n")
