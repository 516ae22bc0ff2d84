"""Cases at random: what every rank ends with agrees with a float64 sum, and is the same bits everywhere.

UNISONO_CASES sets how many; `benchmarks/random_cases/run.py` runs 5,000 on 1 to 9 ranks.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.schedules import find, names
from unisono.transports.arithmetic import DTYPES
from unisono.wires import WIRES, wire_of
from unisono.world import World

ROUNDING = [name for name in WIRES if (wire := wire_of(name, torch.float64)) is not None and wire.elementwise]
"""Wires that round each number by itself: any schedule takes them, and their error is that of a format."""

CASES = int(os.environ.get("UNISONO_CASES", "60"))

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "one node": lambda ranks: regular(1, 1, ranks),
    "two nodes by turns": lambda ranks: place([rank % 2 for rank in range(ranks)]),
    "nodes of two in two supernodes": lambda ranks: place(
        [rank // 2 for rank in range(ranks)], [rank // 4 for rank in range(ranks)]
    ),
    "apart": one_rank_per_node,
}


@dataclass(frozen=True)
class Case:
    """One case; the same on every rank."""

    collective: str
    length: int
    dtype: torch.dtype
    algorithm: str
    wire: str | None
    piece: int
    root: int
    special: bool
    seed: int


def case(seed: int, ranks: int, placement: Placement) -> Case:
    chance = random.Random(seed)
    collective = chance.choice(["allreduce"] * 4 + ["reduce_scatter", "all_gather", "broadcast"])
    offered = [name for name in names() if getattr(find(name, one_rank_per_node(2)), collective, None) is not None]
    return Case(
        collective,
        int(10 ** chance.uniform(0, 6)) - 1,
        chance.choice(DTYPES),
        chance.choice(["auto", "library", *offered]),
        chance.choice([None, *ROUNDING]),
        chance.choice([1 << 14, 1 << 16, 1 << 19]),
        chance.randrange(ranks),
        chance.random() < 0.1,
        seed,
    )


def contribution(this: Case, rank: int) -> torch.Tensor:
    values = np.random.default_rng((this.seed, rank)).normal(size=this.length) * 8
    tensor = torch.from_numpy(values if this.dtype.is_signed else abs(values)).to(this.dtype)
    if this.special and this.dtype.is_floating_point and this.length > 2 and rank == this.root:
        tensor[0], tensor[1] = float("nan"), float("-inf")
    return tensor


def check(this: Case, result: torch.Tensor, ranks: int, where: slice = slice(None)) -> None:
    rows = torch.stack([contribution(this, rank)[where].double() for rank in range(ranks)])
    expected, size = rows.sum(dim=0), rows.abs().sum(dim=0)
    if not this.dtype.is_floating_point:
        assert torch.equal(result, rows.to(torch.int64).sum(dim=0).to(this.dtype)), this
        return
    flight = getattr(torch, this.wire) if this.wire else this.dtype
    coarsest = max(torch.finfo(this.dtype).eps, torch.finfo(flight).eps if flight.itemsize < 8 else 0.0)
    strange = ~expected.isfinite()
    assert torch.equal(result[strange].double().isnan(), expected[strange].isnan()), this
    assert torch.equal(result[strange].double().isinf(), expected[strange].isinf()), this
    off = (result[~strange].double() - expected[~strange]).abs()
    assert bool((off <= coarsest * (ranks + 1) * size[~strange] + 1e-7).all()), (this, float(off.max()))


def carry_out(this: Case, world: World) -> torch.Tensor:
    """Play the case, check it, and return what all ranks must have the same."""
    mine = contribution(this, world.rank)
    ends = slice(*(this.length * place // world.size for place in (world.rank, world.rank + 1)))
    if this.collective == "allreduce":
        world.allreduce(mine, this.algorithm, this.wire)
        check(this, mine, world.size)
        return mine
    if this.collective == "broadcast":
        world.broadcast(mine, this.root)
        assert torch.equal(bits(mine), bits(contribution(this, this.root))), this
        return mine
    if this.collective == "reduce_scatter":
        shard = world.reduce_scatter(mine, this.algorithm, this.wire)
        check(this, shard, world.size, ends)
        return world.all_gather(shard, torch.empty_like(mine))
    out = world.all_gather(mine[ends], torch.empty_like(mine), this.algorithm)
    assert torch.equal(bits(out[ends]), bits(mine[ends])), this
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("where", PLACEMENTS)
def test_random_cases(world: World, where: str) -> None:
    placement = PLACEMENTS[where](world.size)
    worlds: dict[int, World] = {}
    for index in range(CASES // len(PLACEMENTS)):
        this = case(index * 4 + list(PLACEMENTS).index(where), world.size, placement)
        if this.piece not in worlds:
            table = replace(world.table, network=replace(world.table.network, beta=2.5e-3 / this.piece))
            worlds[this.piece] = World(world.comm.Dup(), placement, table)
        same = carry_out(this, worlds[this.piece])
        digest = hashlib.sha256(bits(same).numpy().tobytes()).hexdigest()
        assert len(set(world.all_gather_object(digest))) == 1, this
    for made in worlds.values():
        made.free()
