"""Local SGD: each rank updates alone, and all average their weights every `every` steps (Stich, arXiv:1805.09767).

    every = 4      step 0    step 1    step 2    step 3
    rank 0         update    update    update    update ─┐
    rank 1         update    update    update    update ─┴─ mean of the weights

With `every = 1` it is Theano-MPI's AWAGD (section 4): the mean of weights that were updated alone is, for SGD with
momentum, the weights updated with the mean of the gradients. A bucket of n bytes sends and receives 2 n (p - 1) / p
bytes on each rank, once in `every` steps; for 4 ranks and every = 4 that is 0.375 n a step.

A wire would round weights, so ranks that have one exchange the change of the weights since the last average, with error
feedback (`step/error_feedback.py`). With "int4" and every = 4, that is 0.05 n a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import AGREE, PACK_WEIGHTS, UNPACK_WEIGHTS
from unisono.step.outer import begin_exchange, exchange_change, outer_step, take_outer_step
from unisono.step.program import UPDATE, Operation, Step, StepProgram, Task, bucket, weights
from unisono.step.rule import AUTO, BaseRule, GradientSource, Guarantee, RankState, Traits
from unisono.tables import number


@dataclass(frozen=True)
class LocalSGD(BaseRule):
    """Local SGD: every rank applies its own gradients, and all ranks average their weights every `every` steps.

    `exchange`, `overlap` and `outstanding` are those of `BSP`. With a wire, changes since the last average are
    exchanged.
    """

    every: int = number(16, at_least=1)
    """Steps of a period."""

    def __post_init__(self) -> None:
        name, wire, algorithm = type(self).__name__, self.exchange.wire, self.exchange.algorithm
        if not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"{name}(every={self.every!r}): every must be 1 or more steps")
        if wire is not None and algorithm not in (AUTO, "direct"):
            raise UsageError(
                f"{name} with the wire {wire!r} quantizes once for the sum and once for the result, as {algorithm!r} "
                "does not: set algorithm to 'direct' or 'auto'"
            )

    @property
    def traits(self) -> Traits:
        """Properties: with a wire, which would round weights, changes since the last average are exchanged."""
        return Traits(RankState.OWN if self.exchange.wire is None else RankState.SINCE_ANCHOR, (self.every,))

    def __call__(self, event: Step, _: int, layout: Layout) -> StepProgram:
        """Return the tasks of a step."""
        passing = build.backward(layout, self.found_overlap.backward_lane(layout.deferred))
        if not event.synchronize:
            return (*build.forward(layout), *passing)
        stepping = build.merge(passing, build.own_updates(layout))
        return (*build.forward(layout), *stepping, *self._exchange(event, layout), *build.wait_for_own(layout))

    def _exchange(self, event: Step, layout: Layout) -> list[Task]:
        """Return the tasks that average all weights, where the step does. Those of the first layers go first, as the
        next forward pass needs them first."""
        if not self._ends_period(event):
            return []
        sends = self.collectives(layout)
        agree = sends.place(AGREE, 0, (build.ENDED,), (build.CONTROL,))
        keys = layout.keys[::-1]
        if self.traits.state.has_anchor:
            step = outer_step(1.0, 0.0, False)
            exchange = self.exchange_operation
            tasks = [*begin_exchange(layout, sends, keys, exchange), *take_outer_step(layout, keys, step)]
        else:
            tasks = [task for key in keys for task in self._average(layout, sends, key)]
        return [*agree, *tasks, *(build.buffers(sends) if layout.buffers else ())]

    def _average(self, layout: Layout, sends: build.CollectiveTasks, key: int) -> list[Task]:
        own = tuple(map(weights, layout.bucket(key).parameters))
        return [
            Task(PACK_WEIGHTS, key, UPDATE, (build.CONTROL, *own), (bucket(key),)),
            *sends.place(self.allreduce(), key, (), (bucket(key),)),
            Task(UNPACK_WEIGHTS, key, UPDATE, (bucket(key),), own),
        ]

    def _ends_period(self, event: Step) -> bool:
        return event.synchronize and (event.number + 1) % self.every == 0

    def guarantee(self, event: Step) -> Guarantee:
        """Return the guarantee of an event: own gradients are applied; weights are equal where they are averaged."""
        ends = self._ends_period(event)
        source = GradientSource.OWN if event.synchronize else None
        return Guarantee(source, equal=ends, outer=ends and self.traits.state.has_anchor)

    @property
    def algorithm(self) -> str:
        """Schedule of the exchanges by its name; with a wire that of sums with error feedback, "direct"."""
        return self.exchange.algorithm if self.exchange.wire is None else "direct"

    @property
    def exchange_operation(self) -> Operation:
        """Operation that sums a bucket of changes."""
        return exchange_change(self.exchange.algorithm, self.exchange.wire)
