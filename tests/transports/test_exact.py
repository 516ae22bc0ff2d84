"""Exact sums: an oracle in whole numbers, equal bits for any split and order of shares, and the bound of the error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.testing.test_play import call

from unisono.errors import TensorError
from unisono.transports.barriers import VARIABLE
from unisono.transports.exact import (
    BLOCK,
    MODULUS,
    TILE,
    blocks_of,
    checksum,
    decode,
    encode,
    integers,
    measure,
    sum_of_squares,
    sum_over,
)


@pytest.fixture(params=["", "off"], ids=["compiled", "by PyTorch"], autouse=True, scope="module")
def _code(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield


DTYPES = {torch.float32: (np.float32, 30, -96), torch.float64: (np.float64, 62, -960)}


def quantum_of(block: np.ndarray, dtype: torch.dtype) -> Fraction:
    """The quantum of a block of all shares, of shape (shares, numbers)."""
    _, width, lowest = DTYPES[dtype]
    exponent = max(math.frexp(float(np.abs(block).max()))[1], lowest)
    return Fraction(2) ** (exponent - width + (len(block) - 1).bit_length())


def oracle(shares: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The sum of shares one after another, in Python's whole numbers."""
    total = np.empty(shares.shape[1], DTYPES[dtype][0])
    for start in range(0, shares.shape[1], BLOCK):
        block = shares[:, start : start + BLOCK]
        quantum = quantum_of(block, dtype)
        for place in range(block.shape[1]):
            quanta = sum(round(Fraction(float(value)) / quantum) for value in block[:, place])
            total[start + place] = total.dtype.type(quanta) * total.dtype.type(float(quantum))
    return total


def summed(shares: torch.Tensor, cuts: list[int], ranks: list[list[int]]) -> torch.Tensor:
    """The sum of shares that several ranks have, in buckets that end at `cuts`."""
    result = torch.empty_like(shares[0])
    for start, stop in zip([0, *cuts], [*cuts, shares.shape[1]], strict=True):
        first, last = blocks_of(start, stop)
        maxima = shares.new_zeros(last - first)
        for row in shares:
            measure(row, start, stop, 1.0, maxima)
        total = torch.zeros(stop - start, dtype=integers(result).dtype)
        for several in ranks:
            own = torch.zeros_like(total)
            for share in several:
                encode(shares[share, start:stop], start, maxima, len(shares), 1.0, own, share != several[0])
            total += own
        decode(total, start, maxima, len(shares), result[start:stop])
    return result


@st.composite
def splits(draw: st.DrawFn, length: int, shares: int) -> tuple[list[int], list[list[int]]]:
    """Ends of buckets, and the shares of each rank, in any order."""
    cuts = draw(st.lists(st.integers(0, length), max_size=4).map(sorted))
    order = draw(st.permutations(range(shares)))
    ends = draw(st.lists(st.integers(1, shares - 1), max_size=4, unique=True).map(sorted)) if shares > 1 else []
    return cuts, [list(order[a:b]) for a, b in zip([0, *ends], [*ends, shares], strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
def test_any_split_of_the_shares_gives_the_bits_of_the_oracle_and_holds_the_bound(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    numpy, width, _ = DTYPES[dtype]
    length, count = data.draw(st.integers(1, 2 * BLOCK + 9)), data.draw(st.integers(1, 9))
    limit = 2.0**100
    given_ = data.draw(arrays(numpy, (count, length), elements=st.floats(-limit, limit, width=8 * numpy().itemsize)))
    shares = torch.from_numpy(given_)
    expected = oracle(given_, dtype)
    for _ in range(3):
        result = summed(shares, *data.draw(splits(length, count))).numpy()
        assert result.tobytes() == expected.tobytes()
    for start in range(0, length, BLOCK):
        quantum = quantum_of(given_[:, start : start + BLOCK], dtype)
        for place in range(start, min(start + BLOCK, length)):
            true = sum(Fraction(float(value)) for value in given_[:, place])
            error = abs(Fraction(float(expected[place])) - true)
            assert error <= count * quantum / 2 + Fraction(float(np.spacing(np.abs(expected[place])))) / 2
            largest = Fraction(float(np.abs(given_[:, start : start + BLOCK]).max()))
            if largest >= Fraction(2) ** -96:
                assert quantum <= 4 * count * largest / 2**width


def test_sums_are_as_good_as_those_of_floats() -> None:
    """The largest error of normally distributed numbers is not above that of a serial sum of float32 in rank order."""
    shares = torch.randn(8, 1 << 14, generator=torch.Generator().manual_seed(0))
    true, serial = shares.double().sum(0), torch.zeros(1 << 14)
    for share in shares:
        serial += share
    exact = summed(shares, [], [list(range(8))])
    assert (exact - true).abs().max() <= (serial - true).abs().max()


def test_long_payloads_are_their_blocks() -> None:
    blocks = 1027
    shares = torch.randn(3, BLOCK * blocks + 7, generator=torch.Generator().manual_seed(0))
    unsplit = summed(shares, [], [[0, 1, 2]])
    assert unsplit.equal(summed(shares, [5, BLOCK, BLOCK * (blocks - 3) + 1], [[2], [1, 0]]))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_with_a_number_that_is_not_finite_is_nan(bad: float, dtype: torch.dtype) -> None:
    shares = torch.ones(4, 3 * BLOCK, dtype=dtype)
    shares[2, BLOCK + 3] = bad
    result = summed(shares, [], [[0, 1], [2, 3]]).view(3, BLOCK)
    assert [bool(row.isnan().all()) for row in result] == [False, True, False]
    assert result[[0, 2]].eq(4).all()


def test_the_largest_numbers_and_zeros_and_the_smallest() -> None:
    largest = torch.finfo(torch.float32).max
    shares = torch.tensor([[largest] * BLOCK + [0.0] * BLOCK + [2.0**-140] * BLOCK] * 3)
    shares[1] *= -1
    result = summed(shares, [], [[0], [1], [2]])
    assert result[:BLOCK].eq(largest).all()
    assert result[BLOCK:].eq(0).all(), "below half of the smallest quantum"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_a_world_it_is_the_same_in_chunks(dtype: torch.dtype) -> None:
    shares = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)

    def sums(world: Any) -> list[torch.Tensor]:
        ways = [type(world).allreduce], [type(world).allreduce, type(world).reduce_scatter]
        negated = torch._neg_view(-shares[world.rank])  # whose memory has the other signs
        totals = [sum_over(world, shares[world.rank].clone(), "auto", *functions) for functions in ways]
        return [*totals, sum_over(world, negated, "auto", type(world).allreduce)]

    worlds = call(3, sums)
    wide = shares if dtype.itemsize >= 4 else shares.float()
    expected = summed(wide, [], [[0, 1, 2]]).to(dtype)
    assert all(reduced.equal(expected) and negated.equal(expected) for reduced, _, negated in worlds)
    assert torch.cat([part for _, part, _ in worlds]).equal(expected)


@given(st.data())
def test_squares_do_not_depend_on_how_a_tensor_is_cut(data: st.DataObject) -> None:
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() ** 9
    before, sums = flat.clone(), set()
    for ranks in (1, 2, 3):
        ends = [0, *sorted(data.draw(st.lists(st.integers(0, 1000), min_size=ranks - 1, max_size=ranks - 1))), 1000]
        parts = [[(1, flat[a:b])] for a, b in pairwise(ends)]
        every = call(ranks, lambda world, parts=parts: sum_of_squares(world, parts[world.rank], 3))
        sums |= {tuple(squares.tolist()) for squares in every}
    (only,) = sums
    assert only[0] == only[2] == 0
    assert only[1] == pytest.approx(sum(Fraction(value) ** 2 for value in flat.tolist()), rel=1e-15)
    assert flat.equal(before)
    flat[3] = 1e160
    assert call(2, lambda world: sum_of_squares(world, [(0, flat[500 * world.rank :][:500])], 1))[0].isposinf().all()
    flat[3] = torch.nan
    assert call(2, lambda world: sum_of_squares(world, [(0, flat[500 * world.rank :][:500])], 1))[0].isnan().all()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_negation_that_is_pending_is_made(shape: tuple[int, ...]) -> None:
    """As in the imaginary part of a conjugate's gradient."""
    given, sums = torch.full(shape, 0.75).reshape(-1), []
    for tensor in (torch.full(shape, -0.75)._neg_view().reshape(-1), given):
        maxima, total = torch.zeros(1), torch.zeros(len(given), dtype=torch.int32)
        measure(tensor, 0, len(tensor), 1.0, maxima)
        encode(tensor, 0, maxima, 1, 1.0, total, False)
        sums.append(total.tolist())
    assert sums[0] == sums[1] != [0] * len(given)


def test_what_is_refused() -> None:
    with pytest.raises(TensorError, match=r'wire "exact" sums float32 and float64, not torch\.int32'):
        integers(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(TensorError, match='wire "exact" sums at most 1048576 shares, not 2000000'):
        encode(torch.ones(3), 0, torch.ones(1), 2_000_000, 1.0, torch.zeros(3, dtype=torch.int32))


@given(st.integers(1, 3 * TILE), st.integers(0, 2 * TILE), st.integers(0, 40), st.data())
def test_checksums_are_linear_and_add_up_over_parts(
    length: int, start: int, parameter: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(length)
    terms = [torch.from_numpy(rng.integers(-(1 << 27), 1 << 27, length, np.int32)) for _ in range(4)]
    total = torch.stack(terms).sum(0, dtype=torch.int32)
    cut = data.draw(st.integers(0, length))
    parts = checksum(total[:cut], parameter, start) + checksum(total[cut:], parameter, start + cut)
    each = sum(checksum(term, parameter, start) for term in terms)
    assert (each - parts) % MODULUS == (each - checksum(total, parameter, start)) % MODULUS == 0
    total[data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert (checksum(total, parameter, start) - each) % MODULUS


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_checksums_are_those_of_whole_numbers(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    start, parameter = TILE - 3, 5
    values = torch.tensor([limits.min, limits.max, -1, 0, 1, 2, 3, limits.min]).to(dtype)
    ones = [checksum(torch.tensor([1], dtype=dtype), parameter, start + place) for place in range(len(values))]
    assert all(factor % 2 for factor in ones), "odd factors"
    assert checksum(values, parameter, start) == sum(map(int.__mul__, ones, values.tolist())) % MODULUS
