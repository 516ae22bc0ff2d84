"""Local SGD: each rank updates alone, and all average their weights every `every` steps (Stich, arXiv:1805.09767).

    every = 4      step 0    step 1    step 2    step 3
    rank 0         update    update    update    update ─┐
    rank 1         update    update    update    update ─┴─ mean of the weights

With `every = 1` it is Theano-MPI's AWAGD (section 4): the mean of weights that were updated alone is, for SGD with
momentum, the weights updated with the mean of the gradients. A bucket of n bytes sends and receives 2 n (p - 1) / p
bytes on each rank, once in `every` steps; for 4 ranks and every = 4 that is 0.375 n a step.

A wire would round weights, so ranks that have one exchange the change of the weights since the last average, with error
feedback: an outer step (`rules/outer.py`) at rate 1. With "int4" and every = 4, that is 0.05 n a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.rules.outer import begin_exchange, exchange_change, outer_step, take_outer_step
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import UNPACK_WEIGHTS, pack_weights
from unisono.step.program import UPDATE, Operation, Step, Task, bucket, weights
from unisono.step.rule import AUTO, BaseRule, Guarantee, RankState, Traits
from unisono.tables import number
from unisono.wires import EXACT


@dataclass(frozen=True)
class LocalSGD(BaseRule):
    """Local SGD: every rank applies its own gradients, and all ranks average their weights every `every` steps.

    `exchange`, `overlap` and `outstanding` are those of `BSP`. With a wire, changes since the last average are
    exchanged.
    """

    every: int = number(16, at_least=1)
    """Steps of a period."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wire, algorithm = self.exchange.wire, self.exchange.algorithm
        if wire not in (None, EXACT) and algorithm not in (AUTO, "direct"):
            raise UsageError(
                f"{type(self).__name__} with the wire {wire!r} quantizes once for the sum and once for the result, as "
                f"{algorithm!r} does not: set algorithm to 'direct' or 'auto'"
            )

    @property
    def traits(self) -> Traits:
        """Properties: with a wire, which would round weights, changes since the last average are exchanged."""
        return Traits(RankState.OWN if self.exchange.wire is None else RankState.SINCE_ANCHOR, (self.every,))

    def follow(self, event: Step, rank: int, layout: Layout) -> build.Followers:
        """Return the tasks that follow buckets: own updates, then the exchange of a period."""
        yield from build.own_updates(layout)
        yield build.AT_THE_END, self._exchange(event, rank, layout)
        yield build.AT_THE_END, build.wait_for_weights(layout)

    def _exchange(self, event: Step, rank: int, layout: Layout) -> Iterator[Task]:
        """Yield the tasks that average all weights, where the step does. Those of the first layers go first, as the
        next forward pass needs them first."""
        if not self._ends_period(event):
            return
        sends, keys = self.collectives(layout, rank), layout.keys[::-1]
        yield from self.agree(sends)
        if self.traits.state.has_anchor:
            yield from begin_exchange(layout, sends, keys, self.exchange_operation)
            yield from take_outer_step(layout, keys, outer_step(1.0, 0.0, False))
        else:
            for key in keys:
                bucket_weights = tuple(map(weights, layout.bucket(key).parameters))
                yield Task(pack_weights(), key, UPDATE, (build.CONTROL, *bucket_weights), (bucket(key),))
                yield from sends.place(self.allreduce(), key, (), (bucket(key),))
                yield Task(UNPACK_WEIGHTS, key, UPDATE, (bucket(key),), bucket_weights)
        if layout.buffers:
            yield from build.buffers(sends)

    def _ends_period(self, event: Step) -> bool:
        return event.synchronize and (event.number + 1) % self.every == 0

    def guarantee(self, event: Step) -> Guarantee:
        """Return the guarantee of an event: own gradients are applied; weights are equal where they are averaged."""
        ends = self._ends_period(event)
        return super().guarantee(event)._replace(equal=ends, outer=ends and self.traits.state.has_anchor)

    @property
    def algorithm(self) -> str:
        """Schedule of the exchanges by its name; with a wire that of sums with error feedback, "direct"."""
        return self.exchange.algorithm if self.exchange.wire in (None, EXACT) else "direct"

    @property
    def exchange_operation(self) -> Operation:
        """Operation that sums a bucket of changes."""
        return exchange_change(self.exchange.algorithm, self.exchange.wire)
