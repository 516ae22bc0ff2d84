"""Local SGD: each rank updates alone, and all average their weights every `every` steps (Stich, arXiv:1805.09767).

    every = 4      step 0    step 1    step 2    step 3
    rank 0         update    update    update    update ─┐
    rank 1         update    update    update    update ─┴─ mean of the weights

With `every = 1` it is Theano-MPI's AWAGD (section 3.1): the mean of weights that were updated alone is, for SGD with
momentum, the weights updated with the mean of the gradients. A bucket of n bytes sends and receives 2 n (p - 1) / p
bytes on each rank, once in `every` steps; for 4 ranks and every = 4 that is 0.375 n a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.rules.base import BaseRule
from unisono.step import build
from unisono.step.layout import Layout, Updates
from unisono.step.operations import AGREE, CLIP_ALONE, PACK_WEIGHTS, STEP_ALONE, UNPACK_WEIGHTS, UPDATE_ALONE
from unisono.step.program import MAIN, UPDATE, Step, StepProgram, Task, bucket, gradient, thread, weights
from unisono.step.rule import Promise, Whose


@dataclass(frozen=True)
class LocalSGD(BaseRule):
    """Rule by which every rank applies its own gradients, and weights are averaged every `every` steps."""

    every: int = 16

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"LocalSGD(every={self.every}): weights are averaged every 1 or more steps")
        if self.exchange.wire is not None:
            raise UsageError(
                f"LocalSGD averages weights, which a wire of {self.exchange.wire} would round: leave the wire away"
            )

    def __call__(self, event: Step, _: int, layout: Layout) -> StepProgram:
        """Return the tasks of a step."""
        passing = build.backward(layout, self.found_overlap.backward_lane(layout.deferred))
        if not event.synchronize:
            return (*build.forward(layout), *passing)
        averaging = self._average(layout) if self._averages(event) else []
        stepping = build.behind(passing, self._updates(layout))
        return (*build.forward(layout), *stepping, *averaging, *_wait(layout))

    def _updates(self, layout: Layout) -> list[tuple[int, list[Task]]]:
        """Return the optimizer's tasks, each with the key of the bucket that it follows."""
        everyone = tuple(range(layout.parameters))
        own = tuple(map(gradient, everyone))
        if layout.updates is Updates.OUTSIDE:
            write = (*own, *build.stepped(everyone), thread(MAIN))
            return [(build.AT_THE_END, [Task(STEP_ALONE, 0, MAIN, (), write, parameters=everyone)])]
        if layout.updates is Updates.WHOLE or layout.clip is not None:
            clip = [Task(CLIP_ALONE, 0, UPDATE, (), own)] if layout.clip is not None else []
            return [(build.AT_THE_END, [*clip, _update(0, everyone)])]
        return [(key, [_update(key, layout.ready[key])]) for key in layout.filled if layout.ready[key]]

    def _average(self, layout: Layout) -> list[Task]:
        """Return the tasks that average all weights. Those of the first layers go first, as the next forward pass needs
        them first."""
        sends = self.collectives(layout)
        tasks = [*sends.place(AGREE, 0, (build.ENDED,), (build.WORD,))]
        for key in reversed(layout.keys):
            own = tuple(map(weights, layout.bucket(key).parameters))
            tasks += [
                Task(PACK_WEIGHTS, key, UPDATE, (build.WORD, *own), (bucket(key),)),
                *sends.place(self.allreduce(), key, (), (bucket(key),)),
                Task(UNPACK_WEIGHTS, key, UPDATE, (bucket(key),), own),
            ]
        return [*tasks, *(build.buffers(sends) if layout.buffers else ())]

    def _averages(self, event: Step) -> bool:
        return (event.number + 1) % self.every == 0

    def promise(self, event: Step) -> Promise:
        """Return the promise of an event: own gradients are applied, and weights are equal where they are averaged."""
        return Promise(Whose.OWN if event.synchronize else None, equal=self._averages(event))

    @property
    def period(self) -> int:
        """Number of steps after which the programs repeat."""
        return self.every

    @property
    def differs(self) -> bool:
        """True: ranks' weights differ, unless averaged in every step, and so do the states of their optimizers."""
        return True


def _update(key: int, parameters: tuple[int, ...]) -> Task:
    own = tuple(map(gradient, parameters))
    return Task(UPDATE_ALONE, key, UPDATE, (), (*own, *build.stepped(parameters)), parameters=parameters)


def _wait(layout: Layout) -> list[Task]:
    """Return the main thread's wait: for all weights, unless each is waited for when it is read."""
    return build.wait_for_weights(layout) if layout.updates is Updates.OUTSIDE else build.wait(layout)
