"""Schedule of one pass of a layer as data: products of one thread, exchanges of another, and what each needs.

    gives, 4 slices      products   │ x0 W │ x1 W  │ x2 W  │ x3 W  │ g' x   │         y_i: the product of slice i
    (row forward,        exchanges  │      │ sum 0 │ sum 1 │ sum 2 │ sum 3  │         g' x: the weight's gradient,
     column backward)                                                                 in a backward pass alone

    takes, 4 slices      products   │      │ x0 W  │ x1 W  │ x2 W  │ x3 W   │         x_i: slice i from all ranks
                         exchanges  │ x0   │ x1    │ x2    │ x3    │

A pass that takes and gives has both: first all that it takes, which needs no product, then all that it gives. The order
of the exchanges is the same on all ranks, whatever their speed. With n bytes on p ranks, k slices send what one would,
n (p - 1) / p for a gather, and all but 1 / k of it is beside a product. The product of all slices, `WHOLE`, is beside
the last exchange too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class TaskKind(Enum):
    """Kind of a task."""

    TAKE = "take"
    """Exchange of a slice that a product needs."""
    PRODUCT = "product"
    """Product of a slice."""
    GIVE = "give"
    """Exchange of a slice that a product has made."""
    WHOLE = "whole"
    """Product of all slices: gradients of the weight and the bias."""


class SliceTask(NamedTuple):
    """Task of one slice; a `WHOLE` has the number 0."""

    kind: TaskKind
    number: int


@dataclass(frozen=True)
class PassSchedule:
    """Tasks of a pass: those of the calling thread and those of the thread of exchanges, each in its order."""

    products: tuple[SliceTask, ...]
    exchanges: tuple[SliceTask, ...]
    needs: Mapping[SliceTask, tuple[SliceTask, ...]]
    """Tasks that have to be over before a task begins, besides those before it in its thread."""


def schedule_pass(slices: int, takes: bool, gives: bool, products: bool = True, whole: bool = False) -> PassSchedule:
    """Return the schedule of a pass in `slices` slices, 1 or more.

    `takes` and `gives` say whether slices are exchanged before and after their products; `products` is False where no
    product of a slice is needed, and `whole` True where one of all slices is.
    """
    takings, makings, givings = (
        tuple(SliceTask(kind, number) for number in range(slices) if wanted)
        for kind, wanted in ((TaskKind.TAKE, takes), (TaskKind.PRODUCT, products), (TaskKind.GIVE, gives and products))
    )
    last = (SliceTask(TaskKind.WHOLE, 0),) if whole else ()
    needs: dict[SliceTask, tuple[SliceTask, ...]] = dict.fromkeys(last, takings)
    needs |= {task: (SliceTask(TaskKind.TAKE, task.number),) for task in makings if takes}
    needs |= {task: (SliceTask(TaskKind.PRODUCT, task.number),) for task in givings}
    return PassSchedule(makings + last, takings + givings, needs)
