"""One pass of a layer in slices of its samples, with its exchanges beside its products.

x (rows, ...) ── cut ── slices ── take ── product ── give ──▶ (rows, ...)
                                    └── product of all ───▶ gradients of the weight and the bias
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.activations import own_part
from unisono.tensor_parallel.overlap.flows import Flow
from unisono.tensor_parallel.overlap.player import exchange_engine, play
from unisono.tensor_parallel.overlap.schedule import TaskKind, schedule_pass
from unisono.tensor_parallel.times import ExchangeTimes
from unisono.world import World


class Slices:
    """Activation (rows, ...) that is filled in slices; one slice is the activation itself."""

    def __init__(self, rows: int, slices: int) -> None:
        self.rows, self.slices = rows, slices
        self.whole: Tensor | None = None

    def __getitem__(self, number: int) -> Tensor:
        assert self.whole is not None, "a slice is read once it is there"
        return self.whole[slice(*bounds(self.rows, self.slices, number))]

    def __setitem__(self, number: int, value: Tensor) -> None:
        if self.slices == 1:
            self.whole = value
            return
        if self.whole is None:
            self.whole = value.new_empty((self.rows, *value.shape[1:]))
        self[number].copy_(value)


class PassResult(NamedTuple):
    """Result of a pass."""

    taken: Tensor
    """Activation that the products took: whole, or this rank's part."""
    given: Tensor | None
    """Activation that the pass gives; None where no product was asked for."""


def play_pass(
    flow: Flow,
    x: Tensor,
    slices: int,
    group: World,
    product: Callable[[Tensor], Tensor] | None,
    whole: Callable[[Tensor], object] | None = None,
    dim: int = -1,
) -> PassResult:
    """Return what a pass takes and gives for the activation `x` (rows, ...), whose parts are along `dim`.

    `product` is called with what a slice takes, and returns memory of its own; `whole` once, with all that was taken;
    None where its result is not needed. Called by all ranks of the group together, outside autograd. What exchanges
    were waited for is added to the group's ExchangeTimes.
    """
    own, take, give = Slices(len(x), slices), flow.take, flow.give
    own.whole = own_part(x.detach(), group, dim) if flow.cut else x.detach()
    taken, made, given = own if take is None else Slices(len(x), slices), dict[int, Tensor](), Slices(len(x), slices)

    def take_slice(number: int) -> None:
        assert take is not None
        taken[number] = take(own[number], group, dim)

    def make_slice(number: int) -> None:
        assert product is not None
        found = product(taken[number])
        if give is None:
            given[number] = found
        else:
            made[number] = found

    def give_slice(number: int) -> None:
        assert give is not None
        given[number] = give(made.pop(number), group, dim)

    def make_whole(_: int) -> None:
        assert whole is not None and taken.whole is not None
        whole(taken.whole)

    tasks = schedule_pass(slices, take is not None, give is not None, product is not None, whole is not None)
    actions = {
        TaskKind.TAKE: take_slice,
        TaskKind.PRODUCT: make_slice,
        TaskKind.GIVE: give_slice,
        TaskKind.WHOLE: make_whole,
    }
    group.resource(ExchangeTimes).add(play(tasks, actions, group.resource(exchange_engine)))
    assert taken.whole is not None
    return PassResult(taken.whole, given.whole)
