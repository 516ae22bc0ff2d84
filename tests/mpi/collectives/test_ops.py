"""Every op of every dtype that it reduces, beside a serial reduction in the order of ranks."""

from __future__ import annotations

from functools import cache, reduce
from itertools import product

import numpy as np
import pytest
import torch

from unisono.errors import MismatchError, TensorError, UsageError
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import HALF_DTYPES, NUMPY_DTYPES, NUMPY_OPS, dtypes_of
from unisono.world import World

ALGORITHMS = ["auto", "library", "direct", "flat", "ring", "tree", "hierarchical", "hierarchical/tree"]
ALL_DTYPES = ("auto", "library", "direct", "flat", "ring")
"""Played with every dtype. Others differ in who sends what when: one dtype of each kind of arithmetic."""

ONE_BY_ONE = {
    "sum": np.add,
    "product": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@cache
def contribution(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, whose sums and products are exact in every dtype; floating-point ones have a sign. Not written."""
    low, high = (0, 2) if dtype is torch.bool else (-3, 4) if dtype.is_signed else (1, 4)
    return torch.randint(low, high, (length,), generator=torch.Generator().manual_seed(length * 31 + rank)).to(dtype)


def serial(op: str, rows: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks; the half types in float32."""
    dtype = rows[0].dtype
    arrays = [(row.float() if dtype in HALF_DTYPES else row).numpy() for row in rows]
    return torch.from_numpy(reduce(ONE_BY_ONE[op], arrays)).to(dtype)


@cache
def expected(op: str, ranks: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What the contributions of all ranks give."""
    return serial(op, [contribution(rank, length, dtype) for rank in range(ranks)])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def some_dtypes(op: str, algorithm: str, length: int) -> list[torch.dtype]:
    if length == 1009 and algorithm in ALL_DTYPES:
        return list(dtypes_of(op))
    some = (torch.int16, torch.bool) if length == 70_001 else (torch.int16, torch.bool, torch.float32, torch.bfloat16)
    return [dtype for dtype in some if dtype in dtypes_of(op)]


def check(world: World, op: str, algorithm: str, length: int) -> None:
    for dtype in some_dtypes(op, algorithm, length):
        mine, right = contribution(world.rank, length, dtype), expected(op, world.size, length, dtype)
        for _ in range(2 if algorithm == "auto" else 1):  # the second time goes by the plan that the first has kept
            tensor = mine.clone()
            assert world.allreduce(tensor, algorithm, op=op) is tensor
            assert torch.equal(tensor, right), dtype
        if algorithm in ("auto", "library", "direct", "ring"):
            shard = world.reduce_scatter(mine, algorithm, op=op)
            assert torch.equal(shard, right[slice(*bounds(length, world.size, world.rank))]), dtype


@pytest.mark.parametrize("algorithm", ALGORITHMS[:-1])
@pytest.mark.parametrize("op", NUMPY_OPS)
def test_on_one_node(world: World, op: str, algorithm: str) -> None:
    for length in (0, 1009, 70_001):
        check(world, op, algorithm, length)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_across_nodes(spread: World, algorithm: str) -> None:
    for op in NUMPY_OPS:
        for length in (0, 1009, 70_001):
            check(spread, op, algorithm, length)


@pytest.mark.parametrize("op", NUMPY_OPS)
def test_in_a_window(group: World, op: str) -> None:
    for dtype in dtypes_of(op):
        mine = contribution(group.rank, 20_011, dtype)
        window = group.empty(20_011, dtype)
        for _ in range(2):
            for other in ("maximum", op):  # what is kept for one op is not taken for another
                window.copy_(mine)
                group.allreduce(window, op=other)
                assert torch.equal(window, expected(other, group.size, 20_011, dtype)), (dtype, other)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("op", ["minimum", "maximum", "product"])
def test_nan_and_both_zeros_and_equal_bits_on_all_ranks(spread: World, world: World, op: str) -> None:
    dtypes = (torch.float64, torch.float32, *HALF_DTYPES)
    strange = [float("nan"), -float("nan"), 0.0, -0.0, float("inf"), float("-inf"), 1.5, -2.5]
    for these, algorithms in ((world, ALGORITHMS[:-1]), (spread, ALGORITHMS)):
        for algorithm, length in product(algorithms, (37, 30_011)):
            for dtype in dtypes if algorithm in ALL_DTYPES else (torch.float32, torch.bfloat16):
                places = np.random.default_rng((these.size, length)).integers(0, 8, (these.size, length))
                rows = [torch.tensor(strange, dtype=dtype)[torch.from_numpy(row)] for row in places]
                tensor = rows[these.rank].clone()
                these.allreduce(tensor, algorithm, op=op)
                torch.testing.assert_close(tensor, serial(op, rows), rtol=0, atol=0, equal_nan=True)
                assert len(set(these.all_gather_object(bits(tensor)))) == 1, dtype


@pytest.mark.parametrize("op", ["sum", "minimum", "product"])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_a_wire_carries_every_op(spread: World, op: str, algorithm: str) -> None:
    rows = [contribution(rank, 4099, torch.float32) for rank in range(spread.size)]
    tensor = rows[spread.rank].clone()
    assert torch.equal(spread.allreduce(tensor, algorithm, "bfloat16", op), serial(op, rows))


def test_reduce_scatter_into_out(world: World, spread: World) -> None:
    from unisono.collectives.reduce_scatter import reduce_scatter

    for these in (world, spread):
        for algorithm in ("auto", "library", "ring"):
            for dtype in (torch.float32, torch.bfloat16, torch.bool):
                rows = [contribution(rank, 5003, dtype) for rank in range(these.size)]
                own = slice(*bounds(5003, these.size, these.rank))
                out = torch.zeros(own.stop - own.start, dtype=dtype)
                mine = rows[these.rank].clone()
                result = reduce_scatter(these._group, mine, algorithm, None, "maximum", out)
                assert result is out
                assert torch.equal(out, serial("maximum", rows)[own])
                assert torch.equal(mine, rows[these.rank])
        every_second = torch.zeros(10006)[::2]
        reduce_scatter(these._group, torch.ones(5003 * these.size), out=every_second)
        assert torch.equal(every_second, torch.full((5003,), float(these.size)))
        for wrong in (torch.zeros(1), torch.zeros(5003, dtype=torch.int32)):
            with pytest.raises(TensorError, match="does not fit this rank's chunk"):
                reduce_scatter(these._group, torch.zeros(5003 * these.size), out=wrong)


def test_unsupported_reductions_raise(world: World) -> None:
    for op in ("and", "or", "xor"):
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(TensorError, match=f"by '{op}'; can reduce int64"):
                world.allreduce(torch.zeros(3, dtype=dtype), op=op)
    with pytest.raises(UsageError, match="no op 'average'"):
        world.reduce_scatter(torch.zeros(3), op="average")


def test_tensors_without_memory_of_their_own_raise(world: World, spread: World) -> None:
    for these in (world, spread):
        these.allreduce(torch.ones(4), "library")  # kept for tensors of this length at other addresses
        for algorithm in ("auto", "library"):
            with pytest.raises(TensorError, match="has no memory of its own; give its local tensor"):
                these.allreduce(torch._efficientzerotensor((4,)), algorithm)


def test_quantized_tensors_raise(world: World) -> None:
    quantized = torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8)
    with pytest.raises(TensorError, match="quantized"):
        world.broadcast(quantized)


def test_no_op_is_refused(world: World, spread: World) -> None:
    """It is that of a plan which moves its payload: the bits of floating-point numbers were summed as integers."""
    for each in (world, spread):
        for reduces in (each.allreduce, each.reduce_scatter):
            with pytest.raises(UsageError, match="None"):
                reduces(torch.ones(4 * each.size), op=None)  # type: ignore[operator]


def test_different_ops_raise_mismatch(group: World) -> None:
    if group.size == 1:
        pytest.skip("one rank agrees with itself")
    for length in (5, 300_000):
        for _ in range(2):
            with pytest.raises(MismatchError) as caught:
                group.allreduce(torch.zeros(length), op="minimum" if group.rank else "product")
            assert "op minimum)" in str(caught.value)
            assert "op product)" in str(caught.value)
    assert group.allreduce(torch.ones(3)).tolist() == [group.size] * 3


def test_requested_algorithm_is_used_in_a_window(fresh: World) -> None:
    """A tensor that was summed by one algorithm before is not summed by that one for ever."""
    if fresh.size == 1:
        pytest.skip("needs two ranks")
    tensor = fresh.empty(1 << 18, torch.float32)
    fresh.allreduce(tensor, "direct")
    with pytest.raises(
        MismatchError, match=r"(?s)float32, direct\).*float32, ring\)|float32, ring\).*float32, direct\)"
    ):
        fresh.allreduce(tensor, "ring" if fresh.rank else "direct")


def test_every_reduced_dtype_is_tested() -> None:
    assert {dtype for op in NUMPY_OPS for dtype in dtypes_of(op)} == {*NUMPY_DTYPES, *HALF_DTYPES}
