"""BSP, bulk synchronous parallel: gradients are averaged, or summed, at every step (Theano-MPI section 4: SUBGD).

rank 0   forward  backward ─┐                  ┌─ update   forward ...
rank 1   forward  backward ─┴── sum of each ───┴─ update   forward ...
                                 bucket

main            backward 1   backward 2 ...                    4 ranks, 2 buckets: a bucket of n bytes sends and
update                  pack 1      pack 2  set_grads 1 ...       receives 2 n (p - 1) / p = 1.5 n bytes on each rank
communication   agree          allreduce 1  allreduce 2
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.step import build
from unisono.step.layout import Layout, Updates
from unisono.step.operations import PACK, PACK_SUM, SET_GRADS
from unisono.step.program import UPDATE, Step, Task, bucket
from unisono.step.rule import BaseRule, Traits
from unisono.tables import choice
from unisono.wires import EXACT

SCALES = {"mean": PACK, "sum": PACK_SUM}
"""Operations that pack a bucket, by the combination of the gradients that they give."""


@dataclass(frozen=True)
class BSP(BaseRule):
    """Bulk synchronous parallel: every rank applies the average of all ranks' gradients in each step, as in DDP.

    Before each step all ranks have the same weights. Options: `exchange` (algorithm, wire, bucket size), `overlap`
    ("auto", "chain", "phases", "concurrent", "funnel" or "none"), `outstanding` (largest number of collectives at once;
    None chooses it), and `scale` ("mean", or "sum" over the ranks).
    """

    scale: str = choice("mean", *SCALES)
    """Combination of the gradients: "mean" over all samples; "sum" over ranks, each the mean over its own samples.

    With p equal shares of a batch the sum is p times the mean, so a learning rate tuned for one rank's share need not
    be raised with p. Weight decay is not part of either: it counts once."""

    @property
    def traits(self) -> Traits:
        """Properties: each bucket is averaged, or summed, over the ranks that hold it."""
        return Traits(groups=True, exact=True, sums=self.scale == "sum")

    def exchanges_nothing(self, layout: Layout) -> bool:
        """Return True where a rank is alone: its gradients are the average as they are, unless a rule replaces that."""
        return layout.ranks == 1 and self.exchange.wire != EXACT and type(self).allreduce is BaseRule.allreduce

    def follow(self, _: Step, rank: int, layout: Layout) -> build.Followers:
        """Return the tasks that follow buckets: each is averaged and applied as soon as it is full."""
        sends = self.collectives(layout, rank)
        yield self.due(0), self.agree(sends, self.gate)
        if self.exchanges_nothing(layout):
            yield from build.own_updates(layout) if layout.updates is not Updates.OUTSIDE else ()
            yield build.AT_THE_END, build.wait(layout, own=True)
            return
        for key in layout.keys:
            yield (
                self.due(key),
                (
                    *build.summed(layout, key, sends, SCALES[self.scale], self.allreduce(), self.exchange.wire),
                    Task(SET_GRADS, key, UPDATE, (), (bucket(key),)),
                    *build.updates(layout, key, sends),
                ),
            )
            if layout.buffers and key == layout.filled[-1]:
                yield self.due(key), build.buffers(sends)
        yield build.AT_THE_END, build.wait(layout)
