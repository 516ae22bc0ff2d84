"""Random programs of collective calls with one planted error: a function of the seed, the same on every rank.

    rank 0   whole.allreduce(5 x float32)   dup.barrier()   part.reduce(9 x int8, root 1)
    rank 1   whole.allreduce(5 x float32)   part.barrier()   part.reduce(9 x int8, root 1)      planted: another world

Numbers are small, so that every result is exact in every dtype, and what serial code computes is right to the bit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from unisono.world import World

WORLDS = ("whole", "part", "dup")
DTYPES = ("float64", "float32", "int64", "int32", "int16", "int8", "uint8", "float16", "bfloat16")
RANGES = {"sum": (0, 4), "product": (1, 3), "minimum": (0, 99), "maximum": (0, 99)}
"""The numbers of each op: from, and below."""

REDUCING = ("allreduce", "reduce_scatter", "reduce")
MOVING = ("all_gather", "broadcast", "all_to_all", "exchange")
ROOTED = ("reduce", "broadcast")
CHOSEN = ("allreduce", "reduce_scatter", "all_gather")
"""Those whose algorithm can be chosen."""

ALGORITHMS = ("auto", "auto", "library", "ring", "direct")
ERRORS = ("call", "size", "dtype", "order", "world")


@dataclass(frozen=True)
class Call:
    """One collective call. Its numbers come from `seed`."""

    seed: int
    world: str
    name: str
    length: int = 0
    dtype: str = ""
    op: str = "sum"
    algorithm: str = "auto"
    root: int = 0

    @property
    def signature(self) -> tuple[object, ...]:
        """Calls that differ in this are different; calls of one world that do not cannot be told apart by anybody."""
        root, op = self.root if self.name in ROOTED else 0, self.op if self.name in REDUCING else ""
        return self.name, self.length, self.dtype, root, op

    def __str__(self) -> str:
        return f"{self.world}.{self.name}({self.length} x {self.dtype}, root {self.root}, {self.op}, {self.algorithm})"


@dataclass(frozen=True)
class Program:
    """The calls of all ranks, and those of the one that errs, from call `place` on."""

    seed: int
    ranks: int
    calls: tuple[Call, ...]
    error: str
    rank: int
    place: int
    erring: tuple[Call, ...]

    def of(self, rank: int) -> tuple[Call, ...]:
        """The calls of a rank."""
        return self.erring if rank == self.rank else self.calls


def random_call(rng: random.Random, ranks: int) -> Call:
    """A call of any kind."""
    name, world = rng.choice(["barrier", *REDUCING, *REDUCING, *MOVING]), rng.choice(WORLDS)
    if name == "barrier":
        return Call(rng.getrandbits(40), world, name)
    length, root = int(10 ** rng.uniform(0, 5.3)), rng.randrange(2 if world == "part" else ranks)
    op = rng.choice(list(RANGES)) if name in REDUCING else "sum"
    algorithm = rng.choice(ALGORITHMS) if name in CHOSEN else "auto"
    return Call(rng.getrandbits(40), world, name, length, rng.choice(DTYPES), op, algorithm, root)


def random_program(seed: int, ranks: int) -> Program:
    """3 to 12 calls, and an error that can be noticed."""
    rng = random.Random(f"{seed} {ranks}")
    calls = [random_call(rng, ranks) for _ in range(rng.randint(3, 12))]
    error, rank = ERRORS[seed % len(ERRORS)], rng.randrange(ranks)
    while True:
        place = rng.randrange(len(calls) - (error == "order"))
        erring = list(calls)
        old = calls[place]
        if error == "call":
            erring[place] = replace(random_call(rng, ranks), world=old.world)
        elif error == "size":
            erring[place] = replace(old, length=old.length + rng.choice([5, 64, 10_000]))
        elif error == "dtype":
            erring[place] = replace(old, dtype=rng.choice(DTYPES))
        elif error == "world":
            erring[place] = replace(old, world=rng.choice(WORLDS))
        else:
            erring[place], erring[place + 1] = calls[place + 1], old
        new = erring[place]
        if (old.name == "barrier" and error in ("size", "dtype")) or new.root >= ranks_in(new.world, 0, ranks)[1]:
            calls[place] = random_call(rng, ranks)
        elif (new.world, *new.signature) != (old.world, *old.signature):
            return Program(seed, ranks, tuple(calls), error, rank, place, tuple(erring))
        else:
            calls[place] = random_call(rng, ranks)


def ranks_in(world: str, rank: int, ranks: int) -> tuple[int, int]:
    """The first rank of the world that a rank is in, and how many there are; `part` is halves of four ranks."""
    return (rank // 2 * 2, 2) if world == "part" and ranks == 4 else (0, ranks)


def numbers(call: Call, rank: int, length: int) -> torch.Tensor:
    """What a rank gives."""
    integers = np.random.default_rng((call.seed, rank)).integers(*RANGES[call.op], length)
    return torch.from_numpy(integers).to(getattr(torch, call.dtype))


def reduced(call: Call, members: range) -> torch.Tensor:
    """What the numbers of all are reduced to, in order."""
    rows = torch.stack([numbers(call, rank, call.length).to(torch.int64) for rank in members])
    result = {
        "sum": lambda: rows.sum(0),
        "product": lambda: rows.prod(0),
        "minimum": lambda: rows.amin(0),
        "maximum": lambda: rows.amax(0),
    }[call.op]()
    return result.to(getattr(torch, call.dtype))


def pair(call: Call, source: int, target: int) -> torch.Tensor:
    """What one rank sends to another in an exchange."""
    return numbers(replace(call, seed=call.seed + 1 + target), source, call.length + (source + target) % 3)


def carry_out(call: Call, world: World, rank: int, ranks: int) -> bool:
    """Make the call on this rank; True where the result is what all ranks' numbers give if all make it."""
    first, size = ranks_in(call.world, rank, ranks)
    members, length = range(first, first + size), call.length
    start, stop = (length * (rank - first + more) // size for more in (0, 1))
    given = numbers(call, rank, length) if call.dtype else torch.empty(0)
    match call.name:
        case "barrier":
            world.barrier()
            result = right = given
        case "exchange":
            receives = [torch.empty_like(pair(call, peer, rank)) for peer in members]
            world.all_to_all_v([pair(call, rank, peer) for peer in members], receives)
            result, right = torch.cat(receives), torch.cat([pair(call, peer, rank) for peer in members])
        case "all_to_all":
            result = world.all_to_all(numbers(call, rank, length * size))
            right = torch.cat([numbers(call, peer, length * size).chunk(size)[rank - first] for peer in members])
        case "broadcast":
            result, right = world.broadcast(given, call.root), numbers(call, first + call.root, length)
        case "reduce":
            world.reduce(given, call.root, call.op)
            result, right = given, reduced(call, members) if rank == first + call.root else numbers(call, rank, length)
        case "allreduce":
            result, right = world.allreduce(given, call.algorithm, None, call.op), reduced(call, members)
        case "reduce_scatter":
            result = world.reduce_scatter(given, call.algorithm, None, call.op)
            right = reduced(call, members)[start:stop]
        case _:
            right = numbers(call, first, length)
            result = world.all_gather(right[start:stop].clone(), torch.zeros_like(right), call.algorithm)
    return torch.equal(result, right)
