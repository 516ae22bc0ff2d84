"""Exchanges of a layer's forward and backward pass, as data, from its split.

    layer                         forward                            backward, of y's gradient
    column                        product, gather                    own part, product, sum
    column that gives its part    product                            product, sum
    column that takes a part      gather, product, ...               ..., product, reduce-scatter
    row                           own part, product, sum             product, gather
    row that takes a part         product, ...                       ..., product
    row that gives its part       ..., product, reduce-scatter       gather, product, ...

Each is the composition of two functions of `activations.py` and a product; so the sums and gathers are theirs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from unisono.tensor_parallel.activations import Change, gathered, summed_own_part
from unisono.tensor_parallel.plan import COLUMN, PART, Split
from unisono.world import World


def summed_in_place(x: Tensor, group: World, _: int) -> Tensor:
    """Return the sum of all ranks' `x`, in its memory."""
    return group.allreduce(x)


class Flow(NamedTuple):
    """Exchanges of one pass, around its product."""

    cut: bool
    """True where this rank's part is cut first."""
    take: Change | None
    """Exchange of what the product takes."""
    give: Change | None
    """Exchange of what the product gives."""


class Flows(NamedTuple):
    """Exchanges of both passes of a layer."""

    forward: Flow
    backward: Flow


def flows_of(split: Split) -> Flows:
    """Return the exchanges of a layer that is split by outputs or by inputs."""
    takes_part, gives_part = split.takes == PART, split.gives == PART
    if split.how == COLUMN:
        return Flows(
            Flow(False, gathered if takes_part else None, None if gives_part else gathered),
            Flow(not gives_part, None, summed_own_part if takes_part else summed_in_place),
        )
    return Flows(
        Flow(not takes_part, None, summed_own_part if gives_part else summed_in_place),
        Flow(False, gathered if gives_part else None, None if takes_part else gathered),
    )
