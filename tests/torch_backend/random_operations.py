"""Random operations on random subsets of the ranks, many in flight, each compared with what it must give.

    mpiexec -n 4 python tests/torch_backend/random_operations.py COUNT

Every rank draws the same operations in the same order and takes part in those of its subsets. Now and then a group is
destroyed and made anew. At the end threads, open files and memory are compared with those after the first fifth; MPI
has some 2,000 communicators, which would be used up if any were lost.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import unisono  # noqa: F401 - registers the backend

IN_FLIGHT = 24

RENEW = 15
"""A group is destroyed and made anew every so many operations."""

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]

Check = Callable[[], bool]


class Step(NamedTuple):
    """An operation as all ranks know it. `ranks` are those of its group."""

    number: int
    kind: str
    ranks: tuple[int, ...]
    root: int
    length: int
    dtype: torch.dtype


def value(step: Step, rank: int, length: int | None = None) -> torch.Tensor:
    """What a rank brings to an operation: small whole numbers, whose sums are exact in every dtype."""
    start = 7 * step.number + 3 * rank
    return ((torch.arange(length or step.length) + start) % 5).to(step.dtype)


def start(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """Start an operation; what to wait for, and what then must hold."""
    return KINDS[step.kind](step, group, me)


def all_reduce(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """Summed, or the largest."""
    tensor, largest = value(step, me), step.number % 2 == 0
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group, async_op=True)
    everyone = torch.stack([value(step, rank) for rank in step.ranks])
    return [work], lambda: torch.equal(tensor, everyone.amax(0) if largest else everyone.sum(0).to(step.dtype))


def broadcast(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """From any root."""
    tensor = value(step, me)
    work = dist.broadcast(tensor, step.root, group, async_op=True)
    return [work], lambda: torch.equal(tensor, value(step, step.root))


def all_gather(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """Of sizes that differ."""
    sizes = {rank: step.length + rank for rank in step.ranks}
    parts = [torch.empty(sizes[rank], dtype=step.dtype) for rank in step.ranks]
    work = dist.all_gather(parts, value(step, me, sizes[me]), group, async_op=True)
    pairs = list(zip(parts, step.ranks, strict=True))
    return [work], lambda: all(torch.equal(part, value(step, rank, sizes[rank])) for part, rank in pairs)


def reduce_scatter(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """Equal chunks of one tensor."""
    count = len(step.ranks)
    output = torch.empty(step.length, dtype=step.dtype)
    work = dist.reduce_scatter_single(output, value(step, me, step.length * count), group=group, async_op=True)
    total = torch.stack([value(step, rank, step.length * count) for rank in step.ranks]).sum(0).to(step.dtype)
    return [work], lambda: torch.equal(output, total.chunk(count)[step.ranks.index(me)])


def all_to_all(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """Rank a sends to rank b so many rows as a and b say."""
    rows = {(a, b): step.length + (a + 2 * b) % 3 for a in step.ranks for b in step.ranks}
    goes, comes = [rows[me, other] for other in step.ranks], [rows[other, me] for other in step.ranks]
    output = torch.empty(sum(comes), dtype=step.dtype)
    work = dist.all_to_all_single(output, value(step, me, sum(goes)), comes, goes, group, async_op=True)

    def expected() -> torch.Tensor:
        parts = []
        for other in step.ranks:
            sizes = [rows[other, target] for target in step.ranks]
            parts.append(value(step, other, sum(sizes)).split(sizes)[step.ranks.index(me)])
        return torch.cat(parts)

    return [work], lambda: torch.equal(output, expected())


def ring(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """Each sends to the next."""
    place, count = step.ranks.index(me), len(step.ranks)
    ahead, behind = step.ranks[(place + 1) % count], step.ranks[place - 1]
    came = torch.empty(step.length, dtype=step.dtype)
    receives = dist.irecv(came, behind, group, tag=step.number)
    sends = dist.isend(value(step, me), ahead, group, tag=step.number)
    return [sends, receives], lambda: torch.equal(came, value(step, behind))


def gather(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """To any root."""
    parts = [torch.empty(step.length, dtype=step.dtype) for _ in step.ranks] if me == step.root else None
    work = dist.gather(value(step, me), parts, step.root, group, async_op=True)
    pairs = list(zip(parts or [], step.ranks, strict=False))
    return [work], lambda: all(torch.equal(part, value(step, rank)) for part, rank in pairs)


def barrier(step: Step, group: dist.ProcessGroup, me: int) -> tuple[list[dist.Work], Check]:
    """Nothing to see."""
    return [dist.barrier(group, async_op=True)], lambda: True


KINDS = {f.__name__: f for f in (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, ring, gather, barrier)}


def draw(count: int, subsets: list[tuple[int, ...]]) -> list[Step]:
    """The operations, the same on every rank."""
    chance = random.Random(0)
    steps = []
    for index in range(count):
        ranks = chance.choice(subsets)
        length = int(10 ** chance.uniform(0, 5))
        kind, dtype = chance.choice(sorted(KINDS)), chance.choice(DTYPES)
        steps.append(Step(index, kind, ranks, chance.choice(ranks), length, dtype))
    return steps


def resources() -> tuple[int, int, int]:
    """Threads, open files, and kilobytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        threading.active_count(),
        sum(1 for _ in Path("/proc/self/fd").iterdir()),
        pages * os.sysconf("SC_PAGE_SIZE") >> 10,
    )


def main(count: int) -> None:
    """Run them all; one line at the end."""
    dist.init_process_group("unisono")
    me = dist.get_rank()
    everyone = range(dist.get_world_size())
    subsets = [subset for size in everyone for subset in itertools.combinations(everyone, size + 1) if size]
    groups = {subset: dist.new_group(list(subset)) for subset in subsets}
    flying: deque[tuple[Step, list[dist.Work], Check]] = deque()
    early = resources()

    def land(left: int) -> None:
        while len(flying) > left:
            step, works, check = flying.popleft()
            for work in works:
                work.wait()
            assert check(), f"rank {me}: wrong: {step}"

    for step in draw(count, subsets):
        if step.number % RENEW == RENEW - 1:
            land(0)
            if me in step.ranks:
                dist.destroy_process_group(groups[step.ranks])
            groups[step.ranks] = dist.new_group(list(step.ranks))
        if me in step.ranks:
            flying.append((step, *start(step, groups[step.ranks], me)))
            land(IN_FLIGHT)
        if me == 0 and step.number % 100 == 0:
            print(f"operation {step.number}", file=sys.stderr, flush=True)
        if step.number == count // 5:
            early = resources()
    land(0)
    dist.barrier()
    late = resources()
    assert late[0] <= early[0] + len(subsets), f"rank {me}: threads {early[0]}, then {late[0]}"
    assert late[1] <= early[1] + 4, f"rank {me}: open files {early[1]}, then {late[1]}"
    assert late[2] <= early[2] + 100_000, f"rank {me}: {early[2]} KB, then {late[2]} KB"
    dist.destroy_process_group()
    if me == 0:
        print(f"{count} operations are right; threads, files, KB: {early}, then {late}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
