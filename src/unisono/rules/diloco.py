"""DiLoCo: local SGD with an outer optimizer, in fragments whose exchange runs beside inner steps.

`docs/rules.md` says what it does, `rules/outer.py` has the formulas. With fragments = 4, delay = 1 and every = 16:

    step          0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
    fragment 0            p═══o
    fragment 1                            p═══o
    fragment 2                                            p═══o
    fragment 3                                                            p═══o

    p   packs its change and begins to send it, after the inner step        p═══o   inner steps run meanwhile
    o   takes its outer step, after the inner step

Fragment f of F is packed in step (f + 1) every / F - 1 - delay, rounded down. So a fragment at most is in flight at
once, and links are used evenly.

Of 4 ranks and n bytes of weights, each rank sends 2 n (p - 1) / p = 1.5 n bytes in a period, in 2 rounds for each
bucket; with every = 16 and the wire "int4", that is 0.0125 n bytes in a step, where BSP has 1.5 n.

Sources: DiLoCo (Douillard et al., arXiv:2311.08105): outer Nesterov momentum 0.9 at the rate 0.7. Streaming DiLoCo
(Douillard et al., arXiv:2501.18512): fragments, delay (its tau) and 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.rules.local_sgd import LocalSGD
from unisono.rules.outer import begin_exchange, outer_step, take_outer_step
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.program import Step, Task
from unisono.step.rule import Guarantee, RankState, Traits
from unisono.tables import number


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """DiLoCo: every rank updates alone, and an outer optimizer applies the mean of their changes every `every` steps.

    The outer optimizer is SGD with `outer_rate`, `outer_momentum` and `nesterov`. The weights are exchanged in
    `fragments`, one after another; each exchange runs during `delay` inner steps. `exchange`, `overlap` and
    `outstanding` are those of `BSP`; `Exchange(wire="int4")` sends 4 bits per number.
    """

    outer_rate: float = number(0.7, above=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = number(0.9, at_least=0, below=1)
    """Momentum of the outer optimizer; 0 for none."""
    nesterov: bool = True
    """True for Nesterov momentum, False for plain momentum."""
    fragments: int = number(4, at_least=1)
    """Number of parts of the weights that are exchanged one after another; at most the number of buckets."""
    delay: int = number(1, at_least=0)
    """Number of inner steps during which a fragment is exchanged; 0 waits for the exchange."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every // self.fragments <= self.delay:
            raise UsageError(
                f"DiLoCo(every={self.every}, fragments={self.fragments}, delay={self.delay}): a fragment has "
                f"{self.every} // {self.fragments} = {self.every // self.fragments} steps until the next, which must "
                f"be more than the delay; set every to {self.fragments * (self.delay + 1)} or more, or fewer fragments"
            )

    @property
    def traits(self) -> Traits:
        """Properties: the anchor is what the outer optimizer trains, and each fragment has a bucket or more."""
        return Traits(RankState.ANCHORED, (self.every, self.fragments, self.delay), buckets=self.fragments)

    def _exchange(self, event: Step, rank: int, layout: Layout) -> Iterator[Task]:
        """Yield the tasks of the fragments that are packed in this step, and of those that end in it."""
        count, place = min(self.fragments, len(layout.buckets)), event.number % self.every
        for fragment in range(count):
            keys = layout.keys[fragment::count][::-1]
            first = (fragment + 1) * self.every // count - 1 - self.delay
            if place == first:
                sends = self.collectives(layout, rank)
                yield from self.agree(sends)
                if layout.buffers and fragment == count - 1:
                    yield from build.buffers(sends)  # before the changes: the next forward pass waits for them
                yield from begin_exchange(layout, sends, keys, self.exchange_operation)
            if place == first + self.delay:
                step = outer_step(self.outer_rate, self.outer_momentum, self.nesterov)
                yield from take_outer_step(layout, keys, step)

    def guarantee(self, event: Step) -> Guarantee:
        """Return the guarantee of an event: own gradients are applied, and each period has an outer step of each
        bucket. Weights are equal at the end of a period only without fragments and delay; anchors always are."""
        guarantee = super().guarantee(event)
        return guarantee._replace(equal=guarantee.equal and self.fragments == 1 and not self.delay)
