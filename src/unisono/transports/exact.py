"""Exact sums: integers with one exponent for each block of 256 numbers, agreed by all who sum. Integer addition has no
rounding, so no order of the terms, and no algorithm, piece or bucket size, changes a bit of the result.

2 shares, 1 guard bit; a block of float32      share 0 |  1.5   -0.25 |      share 1 |  2.5    0.75 |
largest magnitudes, then their maximum         1.5 ─┬─ 2.5 < 2**2              quantum 2**(2 - 30 + 1) = 2**-27
                                               2.5 ─┘
integers  round(number / quantum)              |  201326592  -33554432 |     |  335544320  100663296 |
their sum, by any algorithm of any library     |  536870912   67108864 |  x quantum  ─▶  |  4.0   0.5 |

`docs/exact_sums.md` has the bits of a term, the error for S shares and G = ceil(log2 S) guard bits, and where blocks
begin. Who holds a part of a block measures the whole of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.errors import TensorError
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import Array, NumpyArithmetic, Step
from unisono.transports.barriers import is_compiled
from unisono.transports.compiled import compiled

BLOCK = 256
"""Numbers that share an exponent."""

MAX_SUMMANDS = 1 << 20

TILE = 1 << 14
"""Numbers with factors of their own in a checksum; those of later ones are multiplied by a factor of the tile."""

MODULUS = 1 << 64
"""Modulus of checksums."""


Gradients = dict[int, torch.Tensor | None]
"""Gradient of each parameter, by its number; None where there is none."""

Terms = Sequence[tuple[float, Gradients]]
"""Gradients of the shares of a rank, each with its weight in the sum."""

Collective = Callable[..., torch.Tensor]
"""Function of a group, a tensor, and the arguments of `World.allreduce`."""


class Format(NamedTuple):
    """Numbers of bits of a floating-point dtype, and the integers that its numbers become."""

    integer: torch.dtype
    mantissa: int
    bias: int
    width: int
    """Bits of a sum, besides its sign: also the lowest exponent, as it is stored, that a block is given."""


FORMATS = {torch.float32: Format(torch.int32, 23, 127, 30), torch.float64: Format(torch.int64, 52, 1023, 62)}


def integers(flat: torch.Tensor) -> torch.Tensor:
    """Return the memory of floating-point numbers as integers of the same size. Raises TensorError for other dtypes."""
    if flat.dtype not in FORMATS:
        raise TensorError(f'wire "exact" sums float32 and float64, not {flat.dtype}: convert it first')
    return flat.view(FORMATS[flat.dtype].integer)


def blocks_of(start: int, stop: int) -> tuple[int, int]:
    """Return the numbers of the first block that elements [start, stop) touch, and of the one after the last.

    >>> blocks_of(255, 513)
    (0, 3)
    """
    return start // BLOCK, -(-stop // BLOCK)


def measure(values: torch.Tensor, start: int, stop: int, weight: float, maxima: torch.Tensor) -> None:
    """Raise `maxima`, one number for each block that elements [start, stop) of `values` touch, to the largest magnitude
    in the whole block, times `weight`."""
    first, last = blocks_of(start, stop)
    blocks = values[first * BLOCK : last * BLOCK].cpu()
    if _compiles(blocks, maxima):
        compiled.measure(blocks.itemsize, blocks.data_ptr(), len(blocks), weight, maxima.data_ptr())
        return
    rows = torch.nn.functional.pad(blocks.abs(), (0, -len(blocks) % BLOCK)).view(-1, BLOCK)
    maxima.copy_(torch.maximum(maxima, rows.amax(1).mul_(weight)).abs_())  # abs: NaN may have a sign


def encode(
    values: torch.Tensor,
    start: int,
    maxima: torch.Tensor,
    summands: int,
    weight: float,
    into: torch.Tensor,
    add: bool = False,
) -> None:
    """Write values, times `weight`, as integers, or add them to those there; `start` is the place of the first in its
    parameter, and `maxima` are those of its blocks, of all `summands` shares."""
    if _compiles(values, maxima, into):
        arguments = start % BLOCK, maxima.data_ptr(), _checked(summands), weight, into.data_ptr(), add
        compiled.encode(values.itemsize, values.data_ptr(), len(values), *arguments)
        return
    rounded = torch.mul(values, _of_each(_scales(maxima, summands)[0] * weight, start, values)).round_().to(into.dtype)
    into.copy_(into + rounded if add else rounded)


def decode(sums: torch.Tensor, start: int, maxima: torch.Tensor, summands: int, into: torch.Tensor) -> None:
    """Write the numbers of integers, of which the first has the place `start` in its parameter; `into` may be the same
    memory."""
    if _compiles(sums, maxima, into):
        arguments = start % BLOCK, maxima.data_ptr(), _checked(summands), into.data_ptr()
        compiled.decode(into.itemsize, sums.data_ptr(), len(sums), *arguments)
        return
    into.copy_(sums.to(into.dtype) * _of_each(_scales(maxima, summands)[1], start, sums))


def checksum(integers: torch.Tensor, parameter: int, start: int) -> int:
    """Return the checksum of integers from place `start` of `parameter`, its number, on: their sum, each times an odd
    factor of its place, modulo `MODULUS`.

    That of a sum is the sum of the terms' own, that of a whole the sum of its parts'. A changed integer always changes
    it. Several of 4 bytes leave it in 1 case of 2**63 where a lowest bit is among what has changed, and of 2**32 at
    most: highest bits alone. Of 8 bytes an even number of highest bits is not seen: give two words for each.
    """
    factors = _factors()
    if _compiles(integers):
        arguments = parameter, start, factors.data_ptr(), TILE
        return int(compiled.checksum(integers.itemsize, integers.data_ptr(), len(integers), *arguments))
    positions = torch.arange(start, start + len(integers), device="cpu")
    multipliers = factors[positions % TILE] * (((positions // TILE + (parameter << 32)) << 1) + 1)
    return int((integers.long() * multipliers).sum()) % MODULUS


@cache
def _factors() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(TILE).integers(0, 1 << 62, TILE) * 2 + 1)


def _scales(maxima: torch.Tensor, summands: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors that make integers of numbers, and the quanta that make numbers again, for each block."""
    _, mantissa, bias, width = FORMATS[maxima.dtype]
    stored = integers(maxima) >> mantissa  # magnitude < 2 ** (stored - bias + 1)
    bits = width - (_checked(summands) - 1).bit_length()
    power = stored.clamp(min=width) - (bias - 1) - bits  # of the quantum
    factors, quanta = (((bias + exponent).clamp(min=0) << mantissa).view(maxima.dtype) for exponent in (-power, power))
    return factors, quanta.masked_fill_(stored > 2 * bias, torch.nan)


def _of_each(blocks: torch.Tensor, start: int, values: torch.Tensor) -> torch.Tensor:
    """Return for each of the values that begin at place `start` what its block has."""
    return blocks.repeat_interleave(BLOCK)[start % BLOCK :][: len(values)]


def _checked(summands: int) -> int:
    if not 1 <= summands <= MAX_SUMMANDS:
        raise TensorError(f'wire "exact" sums at most {MAX_SUMMANDS} shares, not {summands}')
    return summands


def _compiles(*flat: torch.Tensor) -> bool:
    """Return True where compiled code converts these tensors."""
    return is_compiled() and all(
        tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and tensor.data_ptr() for tensor in flat
    )


class ExactArithmetic(NumpyArithmetic):
    """Exact sums of payloads that one rank sees of all ranks: no exponents need be agreed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, "sum")

    def reduce(self, sources: Sequence[Array], into: Array, _: object = None, /) -> list[Step]:
        return [(_sum_all, (tuple(sources), into))]


def _sum_all(sources: Sequence[Array], into: Array) -> None:
    values, result = [torch.from_numpy(source) for source in sources], torch.from_numpy(into)
    maxima, sums = result.new_zeros(blocks_of(0, len(result))[1]), integers(torch.empty_like(result))
    for tensor in values:
        measure(tensor, 0, len(tensor), 1.0, maxima)
    for index, tensor in enumerate(values):
        encode(tensor, 0, maxima, len(values), 1.0, sums, add=index > 0)
    decode(sums, 0, maxima, len(values), result)


class ExactSums:
    """Exact sums in flat memories of several keys (buckets), which hold parts of parameters."""

    def __init__(
        self,
        summands: int,
        sums: Callable[[int], torch.Tensor],
        pieces: Callable[[int], Iterable[tuple[int, slice, slice]]],
        flat: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        """Sum `summands` shares in the memory `sums` of a key, whose `pieces` are the number of a parameter, its place
        there, and the elements of the parameter; `flat` returns a parameter's gradient, which may be on a device, in
        the order of its memory."""
        self._summands, self._sums, self._pieces, self._flat = summands, sums, pieces, flat
        self._maxima: dict[int, torch.Tensor] = {}

    def measure(self, key: int, terms: Terms) -> None:
        """Measure the blocks of gradients that have parts in a memory."""
        pieces = list(self._blocks(key))
        maxima = self._maxima[key] = self._sums(key).new_zeros(pieces[-1][-1].stop if pieces else 0)
        for parameter, _, part, _, blocks in pieces:
            for weight, gradients in terms:
                if (gradient := gradients[parameter]) is not None:
                    measure(self._flat(gradient, parameter), part.start, part.stop, weight, maxima[blocks])

    def maxima(self, key: int) -> torch.Tensor:
        """Return the largest magnitudes of the blocks, as integers in the same order: NaN is the largest."""
        return integers(self._maxima[key])

    def pack(self, key: int, terms: Terms) -> None:
        """Write the sums of this rank's gradients into a memory as integers of the agreed exponents."""
        maxima, sums = self._maxima[key], self.integers(key)
        for parameter, here, part, _, blocks in self._blocks(key):
            begun = False
            for weight, gradients in terms:
                if (gradient := gradients[parameter]) is not None:
                    values = self._flat(gradient, parameter)[part].cpu()
                    encode(values, part.start, maxima[blocks], self._summands, weight, sums[here], begun)
                    begun = True
            if not begun:
                sums[here].zero_()

    def integers(self, key: int) -> torch.Tensor:
        return integers(self._sums(key))

    def decode(self, key: int, start: int, stop: int) -> None:
        """Make numbers of the integers in elements [start, stop) of a memory, in place."""
        sums, maxima = self._sums(key), self._maxima[key]
        for _, here, part, first, blocks in self._blocks(key):
            begin, end = max(start, here.start), min(stop, here.stop)
            if begin < end:
                place = part.start + begin - here.start  # in the parameter
                block_maxima = maxima[blocks.start + place // BLOCK - first : blocks.stop]
                decode(integers(sums[begin:end]), place, block_maxima, self._summands, sums[begin:end])

    def _blocks(self, key: int) -> Iterator[tuple[int, slice, slice, int, slice]]:
        """Yield each piece, the number of its first block in its parameter, and the places of its blocks among all."""
        offset = 0
        for parameter, here, part in self._pieces(key):
            first, last = blocks_of(part.start, part.stop)
            yield parameter, here, part, first, slice(offset, offset + last - first)
            offset += last - first


def sum_over(
    group: Any, tensor: torch.Tensor, algorithm: str, allreduce: Collective, reduce_scatter: Collective | None = None
) -> torch.Tensor:
    """Return the exact sum of the tensors of a group's ranks by its `allreduce`, flat, in the memory of a contiguous
    `tensor`; with its `reduce_scatter`, this rank's chunk of it. bfloat16 and float16 are summed as float32."""
    flat = tensor.detach().resolve_neg().reshape(-1)
    flat = flat.float() if flat.itemsize < 4 else flat
    result, full = torch.empty_like(flat) if reduce_scatter else flat, slice(0, len(flat))
    sums = ExactSums(group.size, lambda _: result, lambda _: [(0, full, full)], lambda gradient, _: gradient)
    terms: Terms = [(1.0, {0: flat})]
    sums.measure(0, terms)
    allreduce(group, sums.maxima(0), op="maximum")
    sums.pack(0, terms)
    start, stop = bounds(len(flat), group.size, group.rank) if reduce_scatter else (0, len(flat))
    total = (reduce_scatter or allreduce)(group, sums.integers(0), algorithm)
    if reduce_scatter:
        integers(result)[start:stop] = total
    sums.decode(0, start, stop)
    return result[start:stop].to(tensor.dtype)


def sum_of_squares(world: Any, parts: Iterable[tuple[int, torch.Tensor]], count: int) -> torch.Tensor:
    """Return for each index below `count` the sum of squares of all ranks' tensors of that index, in float64: the same
    bits, however the ranks have cut them.

    A square becomes two integers: 28 bits below the power of two above the largest square of all, and 28 more below.
    """
    kept = [(index, part.detach().double().cpu()) for index, part in parts if part.numel()]
    largest = torch.zeros(count, dtype=torch.float64, device="cpu")
    for index, part in kept:
        largest[index] = torch.maximum(largest[index], part.abs().max()).abs()
    world.allreduce(integers(largest), op="maximum")
    units = [math.ldexp(1.0, math.frexp(square)[1] - 28) for square in largest.square().tolist()]
    sums = torch.zeros(count, 2, dtype=torch.int64, device="cpu")
    for index, part in kept:
        scaled = part.square().div_(units[index])
        rounded = scaled.round()
        sums[index] += torch.stack([rounded.long().sum(), scaled.sub_(rounded).mul_(1 << 28).round_().long().sum()])
    world.allreduce(sums)
    high, low = sums.double().unbind(1)
    total = (high + low / (1 << 28)) * torch.tensor(units, dtype=torch.float64, device="cpu")
    total.masked_fill_(largest.square().isinf(), torch.inf)  # too large for float64
    return total.masked_fill_(~largest.isfinite(), torch.nan)
