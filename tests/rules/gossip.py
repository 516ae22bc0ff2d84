"""Rule of `docs/rules.md`: each rank averages its weights with a neighbour. Control messages alone are of all ranks."""

from dataclasses import dataclass

from unisono.placement import Partition
from unisono.rules import BaseRule
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import UNPACK_WEIGHTS, pack_weights
from unisono.step.program import UPDATE, Step, Task, bucket, weights
from unisono.step.rule import RankState, Traits


@dataclass(frozen=True)
class Gossip(BaseRule):
    """Gossip averaging: in each step a rank updates alone, then averages with the next rank, or the one before."""

    @property
    def traits(self) -> Traits:
        return Traits(RankState.OWN, cycle=(2,))  # two steps, after which the programs repeat

    def partitions(self, ranks: int) -> list[Partition]:
        rings = [[(first + n) % ranks for n in range(ranks)] for first in (0, 1)]
        return [tuple(tuple(sorted(ring[n : n + 2])) for n in range(0, ranks, 2)) for ring in rings]

    def follow(self, event: Step, rank: int, layout: Layout) -> build.Followers:
        pair = next(members for members in self.partitions(layout.ranks)[event.number % 2] if rank in members)
        sends = self.collectives(layout)
        yield from build.own_updates(layout)
        yield build.AT_THE_END, self.agree(sends)
        for key in layout.keys:
            own = tuple(map(weights, layout.bucket(key).parameters))
            pack = Task(pack_weights(len(pair)), key, UPDATE, own, (bucket(key),))
            exchange = sends.place(self.allreduce(), key, (), (bucket(key),), pair)
            yield build.AT_THE_END, (pack, *exchange, Task(UNPACK_WEIGHTS, key, UPDATE, (bucket(key),), own))
        yield build.AT_THE_END, build.wait_for_weights(layout)
