"""Loops of people's own under each rule: what they train is what a serial run, or models averaged by hand, give.

bsp, sum            a serial run on the samples of all ranks; the sum's loss is the sum of the ranks' losses
local_sgd, diloco   one model for each rank, whose weights are averaged by hand after every third step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from tests.mpi.reducer.loops import LOOPS, OPTIMIZERS, Loop, Run
from torch import nn

import unisono
from unisono.errors import UsageError
from unisono.rules import BaseRule, DiLoCo, LocalSGD
from unisono.world import World

SMALL = unisono.Exchange(bucket_bytes=200)
"""Buckets of which a network of the loops has several."""

EVERY = 3

RULES: dict[str, BaseRule] = {
    "bsp": unisono.BSP(SMALL),
    "sum": unisono.BSP(SMALL, scale="sum"),
    "local_sgd": LocalSGD(SMALL, every=EVERY),
    "diloco": DiLoCo(SMALL, every=EVERY, fragments=1, delay=0),
}

TOLERANCE = 1e-12


class Refused(NamedTuple):
    """Outcome of a loop that a rule does not take: a UsageError on every rank."""

    words: str
    """Expression that the message matches."""
    ranks: int = 2
    """Least number of ranks on which it is refused; on fewer the loop is right."""


SPARSE = Refused("the model gives sparse gradients, which are not averaged: use sparse=False", ranks=1)

ALIKE = Refused(
    r"the optimizer has changed the weights on (rank \d|\d ranks), but not on (rank \d|\d ranks), so ranks "
    r"differ: call optimizer.step\(\) on all ranks after the same backward passes, or on none"
)

ONE_OPTIMIZER = Refused(
    "averages all weights after the step of one optimizer, which does not have parameter 0.weight: give it all", ranks=1
)

REFUSED: dict[str, dict[str, Refused]] = {
    "skipped_by_one": {"bsp": ALIKE, "sum": ALIKE},
    "dropped_by_one": {"bsp": ALIKE, "sum": ALIKE},
    "accumulated_unevenly": {"bsp": ALIKE, "sum": ALIKE},
    "two_optimizers": {"local_sgd": ONE_OPTIMIZER, "diloco": ONE_OPTIMIZER},
    "sparse_gradients": dict.fromkeys(RULES, SPARSE),
}
"""Outcomes that are not "right", by loop and rule."""

CELLS = [(loop, rule) for loop in LOOPS for rule in RULES]


class Average:
    """Average of p models by hand, after every `EVERY` steps; with an outer optimizer for DiLoCo."""

    def __init__(self, rule: BaseRule, models: Sequence[nn.Module], anchor: Sequence[torch.Tensor]) -> None:
        self._models, self._anchor, self._steps = [list(model.parameters()) for model in models], anchor, 0
        self._outer = None
        if isinstance(rule, DiLoCo):
            self._outer = torch.optim.SGD(self._anchor, rule.outer_rate, rule.outer_momentum, nesterov=True)

    @torch.no_grad()
    def count_step(self) -> None:
        self._steps += 1
        if self._steps % EVERY:
            return
        for anchor, *each in zip(self._anchor, *self._models, strict=True):
            mean = torch.stack([one.detach() for one in each]).mean(0)
            if self._outer is None:
                anchor.copy_(mean)
            else:
                anchor.grad = anchor - mean
        if self._outer is not None:
            self._outer.step()
        for anchor, *each in zip(self._anchor, *self._models, strict=True):
            for one in each:
                one.copy_(anchor)


def by_hand(loop: Loop, rule: BaseRule, optimizer: str, world: World) -> Run:
    """Return the run that a rank's parallel run is to equal."""
    if not rule.differs:
        serial = Run(world.size, range(world.size), optimizer, rule)
        for _ in loop(serial):
            pass
        return serial
    runs = [Run(world.size, [rank], optimizer, rule) for rank in range(world.size)]
    averages: dict[int, Average] = {}
    for stepped in zip(*map(loop, runs), strict=True):
        for models in zip(*stepped, strict=True):
            number = next(place for place, one in enumerate(runs[0].models) if one is models[0])
            if number not in averages:
                averages[number] = Average(rule, models, runs[0].starts[number])
            averages[number].count_step()
    return runs[world.rank]


def tensors(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of all models and the states of all optimizers, with their names."""
    for place, model in enumerate(run.models):
        for name, value in model.state_dict().items():
            yield f"model {place}, {name}", value
    for place, optimizer in enumerate(run.optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {place}, {number}, {name}", value


@pytest.mark.parametrize(("loop", "rule"), CELLS)
def test_loop(world: World, loop: str, rule: str) -> None:
    """Each cell has each optimizer, by turns with the number of ranks."""
    optimizer = list(OPTIMIZERS)[(CELLS.index((loop, rule)) + world.size) % len(OPTIMIZERS)]
    mine = Run(world.size, [world.rank], optimizer, RULES[rule], world)
    refused = REFUSED.get(loop, {}).get(rule)
    if refused is not None and world.size >= refused.ranks:
        with pytest.raises(UsageError, match=refused.words):
            list(LOOPS[loop](mine))
        return
    list(LOOPS[loop](mine))
    expected, found = dict(tensors(by_hand(LOOPS[loop], RULES[rule], optimizer, world))), dict(tensors(mine))
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )
