"""A bucket's exchange as one task or as three, on hosts with several ranks (MXNET-MPI 4.3): README.md has the figures.

    one     allreduce 1 │ allreduce 2 │ ...              one lane
    two     node    reduce 1 │ reduce 2 │ copy 1 │ ...   copies of a bucket behind the sum of the next
            network           exchange 1 │ exchange 2
    three   node, network, and a lane of their own for copies

unisono lab --hosts 4 --ranks-per-host 2 --rate 50mbit -- python -m benchmarks.phases.run 50e6
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median

import torch

import unisono
from unisono.collectives import prepare
from unisono.collectives.group import Group
from unisono.engine.dependencies import Variable
from unisono.engine.engine import Engine
from unisono.schedules.schedule import Program
from unisono.transports.plan import Play, Prepared

ALGORITHM = "hierarchical"

SIZES = ((256 << 10, 8, 11), (1 << 20, 6, 7), (8 << 20, 3, 3))
"""Bytes of a bucket, buckets of a step, steps of each form."""

NODE_SLEEP_SECONDS = 1e-4
"""Longest sleep between polls within a node, where a schedule between nodes may sleep longer."""

REDUCE, NETWORK, COPY = range(3)

Contender = Callable[[Sequence[torch.Tensor], Sequence[Variable], float], None]


def part_of(program: Program, phase: int, alone: bool) -> Program:
    """Return the rounds of a phase of a hierarchical program; a rank that is alone on its node has the network's."""
    cuts = [slice(0, 1), slice(1, -1), slice(-1, None)]
    if alone:
        cuts = [slice(0, 0), slice(None), slice(0, 0)]
    return program._replace(lanes=tuple(lane[cuts[phase]] for lane in program.lanes))


@cache
def prepared(group: Group, length: int, phase: int) -> Prepared:
    """Prepare a phase of the allreduce of so many float32, cut and paced as the whole one: it has the same bits."""
    plan = group.plan("allreduce", ALGORITHM, torch.empty(length), None, "sum")
    schedule, mailboxes = group.plans.schedule(plan), group.mailboxes(plan.call)
    assert mailboxes is not None, "the mailboxes need memory in /dev/shm"
    program = group.plans.program(schedule)
    pace = prepare._pace(group, plan, program, by_node=True)
    seats = prepare.seats_of(group, plan, schedule, mailboxes.pool, pace)
    assert seats is not None
    sleep = pace.max_sleep_seconds if phase == NETWORK else NODE_SLEEP_SECONDS
    pace = pace._replace(chunk_length=seats.chunk_length, in_flight=seats.in_flight, max_sleep_seconds=sleep)
    part = part_of(program, phase, len(group.node_ranks) == 1)
    return prepare._played(group, plan, part, pace, (mailboxes, seats))


def play_of(group: Group, tensor: torch.Tensor, phase: int) -> Play:
    return prepared(group, tensor.numel(), phase)(tensor.data_ptr(), tensor.data_ptr())


class Forms:
    """Steps of each form on one engine: a variable keeps the tasks of a lane in order, as in step programs."""

    def __init__(self, world: unisono.World) -> None:
        self.whole, self.worlds = world.dup(), [world.dup() for _ in range(3)]
        self._groups = [each._group for each in self.worlds]
        self._orders = [Variable(f"order {number}") for number in range(4)]
        self.engine = Engine({"communication": 1, "network": 1, "node": 1, "copy": 1})

    def one(self, tensors: Sequence[torch.Tensor], buckets: Sequence[Variable], gap: float) -> None:
        for tensor, bucket in zip(tensors, buckets, strict=True):
            time.sleep(gap)
            action = partial(self.whole.allreduce, tensor, ALGORITHM)
            self.engine.push(action, mutate=(bucket, self._orders[3]), kind="communication")
        self.engine.wait(*buckets)

    def two(self, tensors: Sequence[torch.Tensor], buckets: Sequence[Variable], gap: float) -> None:
        self._parted(tensors, buckets, gap, late=1, copies=REDUCE)

    def three(self, tensors: Sequence[torch.Tensor], buckets: Sequence[Variable], gap: float) -> None:
        self._parted(tensors, buckets, gap, late=0, copies=COPY)

    def _parted(
        self, tensors: Sequence[torch.Tensor], buckets: Sequence[Variable], gap: float, late: int, copies: int
    ) -> None:
        """Push the three tasks of each bucket; its copies on lane `copies`, behind the sums of `late` more."""
        waiting = list[partial[None]]()
        for tensor, bucket in zip(tensors, buckets, strict=True):
            time.sleep(gap)
            self._push(tensor, bucket, REDUCE, REDUCE)
            self._push(tensor, bucket, NETWORK, NETWORK)
            waiting.append(partial(self._push, tensor, bucket, COPY, copies))
            if len(waiting) > late:
                waiting.pop(0)()
        for copy in waiting:
            copy()
        self.engine.wait(*buckets)

    def _push(self, tensor: torch.Tensor, bucket: Variable, phase: int, lane: int) -> None:
        action = play_of(self._groups[lane], tensor, phase)
        self.engine.push(action, mutate=(bucket, self._orders[lane]), kind=("node", "network", "copy")[lane])

    def phases(self, tensor: torch.Tensor) -> dict[str, Play]:
        """Return the whole allreduce and its phases, each alone."""
        names = ("sum in the node", "network", "copies in the node")
        parts = {name: play_of(self._groups[phase], tensor, phase) for phase, name in enumerate(names)}
        return {"whole": partial(self.whole.allreduce, tensor, ALGORITHM), **parts}


def seconds(world: unisono.World, action: Callable[[], object]) -> float:
    """Return the seconds of an action on the slowest rank."""
    world.barrier()
    begun = time.perf_counter()
    action()
    taken = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    return float(world.allreduce(taken, op="maximum"))


def by_turns(world: unisono.World, actions: dict[str, Callable[[], object]], times: int) -> dict[str, list[float]]:
    """Return the seconds of each action, in turns; the first turn is not counted."""
    taken = {name: list[float]() for name in actions}
    for turn in range(times + 1):
        for name in list(actions)[:: 1 if turn % 2 else -1]:
            taken[name].append(seconds(world, actions[name]))
    return {name: each[1:] for name, each in taken.items()}


def main() -> None:
    world, rate = unisono.init(), float(sys.argv[1])
    forms, nodes = Forms(world), len(world._group.placement.nodes)
    for nbytes, number, times in SIZES:
        bound = 8 * nbytes * 2 * (nodes - 1) / nodes / rate
        torch.manual_seed(world.rank)
        source = [torch.randn(nbytes // 4) for _ in range(number)]
        contenders: dict[str, Contender] = {"one": forms.one, "two": forms.two, "three": forms.three}
        forms.phases(source[0])  # prepares, which all ranks do together
        sums = {name: [tensor.clone() for tensor in source] for name in contenders}
        buckets = [Variable("bucket") for _ in source]
        for name, step in contenders.items():
            step(sums[name], buckets, 0.0)
            assert all(map(torch.equal, sums[name], sums["one"])), f"{name} has other bits than one"
        for tensor in (tensor for each in sums.values() for tensor in each):
            tensor.zero_()
        report(world, f"{nbytes >> 10} KiB alone", by_turns(world, forms.phases(sums["one"][0]), times), bound)
        for words, gap in (("at once", 0.0), ("as computed", bound)):
            steps = {name: partial(step, sums[name], buckets, gap) for name, step in contenders.items()}
            taken = by_turns(world, steps, times)
            report(world, f"{number} of {nbytes >> 10} KiB, {words}", taken, number * bound)
    forms.engine.close()


def report(world: unisono.World, words: str, taken: dict[str, list[float]], bound: float) -> None:
    """Print medians, ranges, the median over the bound, and the median ratio to the first of the same turn."""
    first = next(iter(taken.values()))
    cells = [
        f"{name} {1e3 * median(each):.1f} ms ({1e3 * min(each):.1f} to {1e3 * max(each):.1f}), "
        f"{median(each) / bound:.2f} of the bound, {median(a / b for a, b in zip(each, first, strict=True)):.2f}"
        for name, each in taken.items()
    ]
    if world.rank == 0:
        print(f"{words}: {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
