"""Cases at random on one node, under every candidate: the bits of a serial reduction, and mismatches with names.

UNISONO_CASES and UNISONO_MISMATCHES set how many; `benchmarks/random_cases/run.py` runs 5,000 and 300.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from unisono.collectives.payload import name_of
from unisono.collectives.trials import candidates
from unisono.errors import MismatchError
from unisono.network.choice import Choice, parse_table
from unisono.placement import regular
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import HALF_DTYPES, dtypes_of
from unisono.transports.barriers import VARIABLE as COMPILED
from unisono.world import World

CASES = int(os.environ.get("UNISONO_CASES", "60"))
MISMATCHES = int(os.environ.get("UNISONO_MISMATCHES", "30"))

COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
REDUCTIONS = COLLECTIVES[:2]

TRIED = Choice("auto", "tried")
"""Stand-in for the choice of the ranks' own trials."""

COMBINE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (np.add, torch.add),
    "product": (np.multiply, torch.mul),
    "minimum": (np.minimum, torch.minimum),
    "maximum": (np.maximum, torch.maximum),
}
"""Ops in NumPy, and for half precision in PyTorch's float32."""


class Case(NamedTuple):
    """One call; the same on every rank."""

    collective: str
    length: int
    """Elements of the whole payload: a multiple of the number of ranks."""
    dtype: torch.dtype
    op: str
    root: int
    memory: str
    special: bool
    compiled: bool
    seed: int

    @property
    def words(self) -> str:
        """Beginning of the call as errors name it."""
        return f"{self.collective}({self.length} x {name_of(self.dtype)}"


def draw(chance: random.Random, ranks: int, seed: int) -> tuple[Case, Choice]:
    """Return a case, and one of its candidates."""
    collective, op = chance.choice([*COLLECTIVES, "allreduce"]), chance.choice([*COMBINE, "sum", "sum"])
    length = int(10 ** chance.uniform(0, 6)) - 1
    this = Case(
        collective,
        length - length % ranks if collective == "all_to_all" else length,
        chance.choice(dtypes_of(op)),
        op if collective in REDUCTIONS else "sum",
        chance.randrange(ranks),
        chance.choice(["own", "own", "window", "strided", "unaligned"]),
        chance.random() < 0.2,
        chance.random() < 0.7,
        seed,
    )
    return this, chance.choice([*candidates_of(this, ranks), TRIED])


def candidates_of(this: Case, ranks: int) -> list[Choice]:
    op = this.op if this.collective in REDUCTIONS else None
    return candidates(this.collective, ranks, op, this.dtype.is_floating_point)


class Worlds:
    """Worlds of the same ranks on one node, each with the table of one candidate, and a room in shared memory."""

    def __init__(self, world: World) -> None:
        self._world, self._made = world, dict[tuple[Choice, bool], tuple[World, torch.Tensor]]()

    def find(self, choice: Choice, compiled: bool) -> tuple[World, torch.Tensor]:
        if (choice, compiled) not in self._made:
            rows = {
                name: [{"where": "one node", "algorithm": choice.algorithm, "transport": choice.transport}]
                for name in COLLECTIVES
                if choice in candidates(name, 2, None, floating=False) and choice != Choice("library", "library")
            }
            if choice.algorithm == "library":
                rows = {name: [{"where": "one node", "algorithm": "library"}] for name in COLLECTIVES}
            table = parse_table(rows, "test") if rows else self._world.table
            made = World(self._world.comm.Dup(), regular(1, 1, self._world.size), table)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(COMPILED, "on" if compiled else "off")
                self._made[choice, compiled] = made, made.empty(8 << 20, torch.uint8)
        return self._made[choice, compiled]

    def free(self) -> None:
        for world, _ in self._made.values():
            world.free()


@pytest.fixture
def worlds(world: World) -> Iterator[Worlds]:
    if world.size == 1:
        pytest.skip("one rank has no candidates")
    worlds = Worlds(world)
    yield worlds
    worlds.free()


def contribution(this: Case, rank: int) -> torch.Tensor:
    values = np.random.default_rng((this.seed, rank)).normal(size=this.length) * 8
    tensor = torch.from_numpy(values if this.dtype.is_signed else abs(values)).to(this.dtype)
    if this.special and this.dtype.is_floating_point:
        tensor[rank::7], tensor[1::5] = -0.0, 0.0 if rank % 2 else -0.0
        if rank == this.root:
            tensor[::11], tensor[3::11] = float("nan"), float("-inf")
    return tensor


def place_in(this: Case, room: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in the memory that the case names."""
    if this.memory == "window":
        first = 64 * (this.seed % 3)
        placed = room[first : first + tensor.nbytes].view(this.dtype) if tensor.nbytes <= len(room) - 192 else tensor
    elif this.memory == "strided":
        placed = torch.zeros(2 * len(tensor), dtype=this.dtype)[::2]
    elif this.memory == "unaligned" and tensor.nbytes:
        placed = torch.frombuffer(bytearray(tensor.nbytes + 1), dtype=this.dtype, offset=1)
    else:
        placed = torch.empty_like(tensor)
    return placed.copy_(tensor)


def reduced(this: Case, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the reduction of rows in their order."""
    in_numpy, in_torch = COMBINE[this.op]
    if this.dtype in HALF_DTYPES:
        return reduce(in_torch, [row.float() for row in rows]).to(this.dtype)
    with np.errstate(all="ignore"):
        return torch.from_numpy(reduce(in_numpy, [row.numpy() for row in rows]))


def call(this: Case, world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Make the call; return the result."""
    own = slice(*bounds(this.length, world.size, world.rank))
    if this.collective == "allreduce":
        return world.allreduce(tensor, op=this.op)
    if this.collective == "reduce_scatter":
        return world.reduce_scatter(tensor, op=this.op)
    if this.collective == "all_gather":
        return world.all_gather(tensor[own].clone(), tensor)
    if this.collective == "all_to_all":
        return world.all_to_all(tensor)
    return world.broadcast(tensor, this.root)


def expected(this: Case, rank: int, rows: list[torch.Tensor]) -> torch.Tensor:
    ends = [slice(*bounds(this.length, len(rows), part)) for part in range(len(rows))]
    if this.collective == "allreduce":
        return reduced(this, rows)
    if this.collective == "reduce_scatter":
        return reduced(this, rows)[ends[rank]]
    if this.collective == "all_gather":
        return torch.cat([row[end] for row, end in zip(rows, ends, strict=True)])
    if this.collective == "all_to_all":
        return torch.cat([row[ends[rank]] for row in rows])
    return rows[this.root]


def bits(this: Case, tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in which all NaNs are equal; and after a minimum or a maximum, 0 and -0."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
        tensor = tensor + 0.0 if this.op in ("minimum", "maximum") else tensor
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def check(this: Case, choice: Choice, worlds: Worlds) -> None:
    """Make a call twice, the second time as it was prepared; compare it with one process's own reduction."""
    world, room = worlds.find(choice, this.compiled)
    rows = [contribution(this, rank) for rank in range(world.size)]
    right, tensor = expected(this, world.rank, rows), place_in(this, room, rows[world.rank])
    for _ in range(2):
        tensor.copy_(rows[world.rank])
        result = call(this, world, tensor)
        assert torch.equal(bits(this, result), bits(this, right)), (this, choice)
        if this.collective in ("reduce_scatter", "all_to_all"):
            assert torch.equal(bits(this, tensor), bits(this, rows[world.rank])), (this, choice)
    if this.collective in ("allreduce", "all_gather", "broadcast"):
        digest = hashlib.sha256(bits(this, result).numpy().tobytes()).hexdigest()
        assert len(set(world.all_gather_object(digest))) == 1, (this, choice)


def test_every_candidate_has_the_bits_of_a_serial_reduction(world: World, worlds: Worlds) -> None:
    for seed in range(CASES):
        this, choice = draw(random.Random(1000 * world.size + seed), world.size, seed)
        check(this, choice, worlds)


def vary(chance: random.Random, this: Case, ranks: int) -> Case:
    """Return another call on the same memory."""
    kind = chance.choice(["collective", "length", "dtype", "op", "root"])
    if kind == "op" and this.collective in REDUCTIONS:
        return this._replace(op="minimum" if this.op != "minimum" else "maximum")
    if kind == "root" and this.collective == "broadcast":
        return this._replace(root=(this.root + 1) % ranks)
    if kind == "dtype":
        return this._replace(dtype=torch.int32 if this.dtype is not torch.int32 else torch.float32)
    if kind == "collective":
        return this._replace(
            collective=chance.choice([collective for collective in COLLECTIVES if collective != this.collective])
        )
    return this._replace(length=max(ranks, this.length - ranks * chance.choice([1, 1, this.length // (2 * ranks)])))


def test_mismatches_are_named_on_every_rank(world: World, worlds: Worlds) -> None:
    for seed in range(MISMATCHES):
        chance = random.Random(50_000 * world.size + seed)
        this, choice = draw(chance, world.size, seed)
        length = (this.length // world.size + 2) * world.size
        this = this._replace(length=length, dtype=chance.choice([torch.float32, torch.int32]), memory="own")
        other, odd = vary(chance, this, world.size), chance.randrange(world.size)
        here, _ = worlds.find(choice if choice in candidates_of(this, world.size) else TRIED, this.compiled)
        memory = torch.zeros(max(this.length, other.length), dtype=torch.int32)
        tensors = {variant: memory[: variant.length].view(variant.dtype) for variant in (this, other)}
        for variant in chance.choice([[], [this], [this, this, other, other]]):  # prepared on all ranks
            call(variant, here, tensors[variant].zero_())
        mine = other if here.rank == odd else this
        with pytest.raises(MismatchError) as caught:
            call(mine, here, tensors[mine].zero_())
        assert this.words in str(caught.value), (this, other)
        assert other.words in str(caught.value), (this, other)
        assert tensors[mine].eq(0).all(), (this, other)
        assert here.allreduce(torch.ones(20_000)).eq(here.size).all()
