"""Loops of people's own under each rule: what they train is what a serial run, or models averaged by hand, give.

bsp, sum, sharded   a serial run on the samples of all ranks; the sum's loss is the sum of the ranks' losses
local_sgd, diloco   one model for each rank, whose weights are averaged by hand after every third step
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from tests.mpi.loops.loops import LOOPS, OPTIMIZERS, Loop, Run
from torch import nn

import unisono
from unisono.errors import MismatchError, UnisonoError, UsageError
from unisono.launch import ranks_started
from unisono.rules import BaseRule, DiLoCo, LocalSGD
from unisono.world import World

SMALL = unisono.Exchange(bucket_bytes=200)
"""Buckets of which a network of the loops has several."""

EVERY = 3

RULES: dict[str, BaseRule] = {
    "bsp": unisono.BSP(SMALL),
    "sum": unisono.BSP(SMALL, scale="sum"),
    "sharded": unisono.Sharded(SMALL),
    "local_sgd": LocalSGD(SMALL, every=EVERY),
    "diloco": DiLoCo(SMALL, every=EVERY, fragments=1, delay=0),
}

TOLERANCE = 1e-12


class Refused(NamedTuple):
    """Outcome of a loop that a rule does not take: the same error on every rank."""

    message: str
    """Expression that the message matches."""
    ranks: int = 2
    """Least number of ranks on which it is refused; on fewer the loop is right."""
    error: type[UnisonoError] = UsageError


SPARSE = Refused("the model gives sparse gradients, which are not averaged: use sparse=False", ranks=1)

ALIKE = Refused(
    r"the weights were changed on ranks? [^:]*, but not on ranks? [^:]*, so ranks differ \(an optimizer step, "
    r"load_state_dict or an assignment on some ranks alone\): make it on all ranks, after the same backward passes, or"
)

DIFFERENT = Refused(
    r"the weights of ranks differ: since the last backward pass there were \d+ changes in place on rank 0, "
)

IN_BACKWARD = Refused("weights have changed while the backward pass ran, from gradients of this rank alone", ranks=1)

ONE_OPTIMIZER = Refused(
    "averages all weights after the step of one optimizer, which does not have parameter 0.weight: give it all", ranks=1
)

SHARDS = Refused(r"needs the gradient of parameter \S+, which Sharded has summed in shards, .* give all", ranks=1)

ONE_PASS = Refused(
    r"parameter \S+ has a gradient of an earlier backward pass, which Sharded has not kept: call optimizer.zero_grad",
    ranks=1,
)

NOT_SUMMED = Refused(r"parameter \S+ has a gradient in .grad that Sharded has not summed: the program has set", ranks=1)

LEFT_OUT = Refused(r"rank \d of \d has left out the optimizer.step\(\) after a backward pass", error=MismatchError)

UNEVEN = Refused(
    rf"have left out the optimizer.step|has left out the optimizer.step|{ONE_PASS.message}", 1, UnisonoError
)

REMOVED_BY_ONE = Refused(r"parameter \S+ has no gradient on 1 of \d ranks at optimizer.step", error=MismatchError)

OF_TWO_MODELS = Refused("has hooks on its step, which would see no gradients: .* give each model its own", ranks=1)

NOT_BY_ELEMENT = Refused("LBFGS is not known to update each element by itself: use unisono.BSP", ranks=1)

REFUSED: dict[str, dict[str, Refused]] = {
    "accumulated": {"sharded": ONE_PASS},
    "accumulated_both_ways": {"sharded": ONE_PASS},
    "forwards_before_backwards": {"sharded": ONE_PASS},
    "one_graph_twice": {"sharded": ONE_PASS},
    "disjoint": {"sharded": ONE_PASS},
    "overlapping": {"sharded": ONE_PASS},
    "zeros_kept": {"sharded": ONE_PASS},
    "no_second_batch_on_one": {"sharded": ONE_PASS},
    "generator_and_critic": {"sharded": ONE_PASS},
    "gradients_replaced": {"sharded": SHARDS},
    "gradients_clipped": {"sharded": SHARDS},
    "gradients_with_noise": {"sharded": SHARDS},
    "skipped_by_one": {"bsp": ALIKE, "sum": ALIKE, "sharded": LEFT_OUT},
    "dropped_by_one": {"bsp": ALIKE, "sum": ALIKE, "sharded": REMOVED_BY_ONE},
    "accumulated_unevenly": {"bsp": ALIKE, "sum": ALIKE, "sharded": UNEVEN},
    "two_models_one_optimizer": {"sharded": OF_TWO_MODELS},
    "two_optimizers": {"sharded": SHARDS, "local_sgd": ONE_OPTIMIZER, "diloco": ONE_OPTIMIZER},
    "never_cleared": {"sharded": ONE_PASS},
    "body_without_optimizer": {"local_sgd": ONE_OPTIMIZER, "diloco": ONE_OPTIMIZER},
    "gradients_set": {"sharded": NOT_SUMMED},
    "stepped_twice_by_one": {"bsp": DIFFERENT, "sum": DIFFERENT},
    "weights_loaded_on_one": {"bsp": DIFFERENT, "sum": DIFFERENT},
    "stepped_in_backward": dict.fromkeys(RULES, IN_BACKWARD),
    "lbfgs": {"sharded": NOT_BY_ELEMENT},
    "perturbed": {"sharded": SHARDS},
    "sparse_gradients": dict.fromkeys(RULES, SPARSE),
}
"""Outcomes that are not "right", by loop and rule."""

Cell = tuple[str, str]

ONE_RANK_ALONE = {("stepped_twice_by_one", "sharded"), ("weights_loaded_on_one", "sharded")}
"""Cells without a common outcome: the rank that steps twice raises an error alone, which ends the job; weights that one
rank has loaded are not compared."""

RANKS = ranks_started(os.environ) or 1

WITH_A_THIRD = {name for name in LOOPS if name.endswith(("_one", "unevenly"))} | {"plain", "lbfgs", "one_element"}
"""Loops that show something else on 3 ranks than on 2: two ranks that agree beside one that differs, sums of three, and
shards that are empty."""

CELLS: list[Cell] = [
    (loop, rule)
    for loop in LOOPS
    for rule in RULES
    if (loop, rule) not in ONE_RANK_ALONE and (RANKS < 3 or loop in WITH_A_THIRD)
]


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
            mean = torch.stack([parameter.detach() for parameter in each]).mean(0)
            if self._outer is None:
                anchor.copy_(mean)
            else:
                anchor.grad = anchor - mean
        if self._outer is not None:
            self._outer.step()
        for anchor, *each in zip(self._anchor, *self._models, strict=True):
            for parameter in each:
                parameter.copy_(anchor)


def by_hand(loop: Loop, rule: BaseRule, optimizer: str, ranks: int) -> list[Run]:
    """Return the runs that the parallel runs of the ranks are to equal: one of each rank, or one of all."""
    if not rule.traits.state.differs:
        serial = Run(ranks, range(ranks), optimizer, rule)
        list(loop(serial))
        return [serial]
    runs = [Run(ranks, [rank], optimizer, rule) for rank in range(ranks)]
    averages: dict[int, Average] = {}
    for stepped in zip(*map(loop, runs), strict=True):
        for models in zip(*stepped, strict=True):
            index = next(place for place, model in enumerate(runs[0].models) if model is models[0])
            if index not in averages:
                averages[index] = Average(rule, models, runs[0].starts[index])
            averages[index].count_step()
    return runs


def tensors(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of all models and the states of all optimizers, with their names."""
    for place, model in enumerate(run.models):
        for name, value in model.state_dict().items():
            yield f"model {place}, {name}", value
    for place, optimizer in enumerate(run.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {place}, {index}, {name}", value


def optimizer_of(cell: Cell, ranks: int) -> str:
    """Return the optimizer of a cell: each has all of them, by turns with the number of ranks."""
    return list(OPTIMIZERS)[(CELLS.index(cell) + ranks) % len(OPTIMIZERS)]


def refused_on(cell: Cell, ranks: int) -> Refused | None:
    refused = REFUSED.get(cell[0], {}).get(cell[1])
    return refused if refused is not None and ranks >= refused.ranks else None


@cache
def references(world: World) -> dict[Cell, list[dict[str, torch.Tensor]]]:
    """Return what the runs by hand give, of all cells that are not refused. Each rank makes its part of them."""
    mine = {}
    for place, cell in enumerate(CELLS):
        if place % world.size == world.rank and refused_on(cell, world.size) is None:
            runs = by_hand(LOOPS[cell[0]], RULES[cell[1]], optimizer_of(cell, world.size), world.size)
            mine[cell] = [dict(tensors(run)) for run in runs]
    return {cell: runs for part in world.all_gather_object(mine) for cell, runs in part.items()}


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_loop(world: World, cell: Cell) -> None:
    loop, rule = LOOPS[cell[0]], RULES[cell[1]]
    run = Run(world.size, [world.rank], optimizer_of(cell, world.size), rule, world)
    if (refused := refused_on(cell, world.size)) is not None:
        with pytest.raises(refused.error, match=refused.message):
            list(loop(run))
        return
    list(loop(run))
    runs = references(world)[cell]
    expected, actual = runs[world.rank % len(runs)], dict(tensors(run))
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=TOLERANCE, msg=partial("{}: {}".format, name))
