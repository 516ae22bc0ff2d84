from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
import torch

from unisono.errors import TensorError, UsageError
from unisono.transports.arithmetic import DTYPES, HALF_DTYPES, NUMPY_OPS, arithmetic_of, dtypes_of, mover_of, perform

ONE_BY_ONE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": lambda left, right: left + right,
    "product": lambda left, right: left * right,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "and": lambda left, right: left & right,
    "or": lambda left, right: left | right,
    "xor": lambda left, right: left ^ right,
}
"""The ops as PyTorch has them, two by two."""


def memory(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.view(torch.uint8).numpy().tobytes())


def contribution(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every dtype."""
    low, high = (0, 2) if dtype is torch.bool else (1, 4)
    return torch.randint(low, high, (37,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def serial(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks; unsigned integers, which PyTorch does not reduce, as int64."""
    wide = torch.int64 if tensors[0].dtype in (torch.uint16, torch.uint32, torch.uint64) else tensors[0].dtype
    return reduce(ONE_BY_ONE[op], [tensor.to(wide) for tensor in tensors]).to(tensors[0].dtype)


@pytest.mark.parametrize("op", NUMPY_OPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("own", [None, 0, 1, 4])
@pytest.mark.parametrize("spare", [False, True], ids=["", "spare"])
def test_reduce_changes_only_its_target(op: str, ranks: int, own: int | None, spare: bool) -> None:
    if own is not None and own >= ranks:
        pytest.skip("no such rank")
    for dtype in dtypes_of(op):
        arithmetic = arithmetic_of(dtype, op)
        values = [contribution(rank, dtype) for rank in range(ranks)]
        buffers = [memory(value) for value in values]
        views = [arithmetic.view(buffer) for buffer in buffers]
        target_buffer = memory(torch.zeros(37, dtype=dtype)) if own is None else buffers[own]
        target = arithmetic.view(target_buffer) if own is None else views[own]
        perform(arithmetic.reduce(views, target, views[0] if spare else None))
        assert target_buffer == memory(serial(op, values)), dtype
        for rank, (buffer, value) in enumerate(zip(buffers, values, strict=True)):
            assert rank == own or (spare and rank == 0) or buffer == memory(value), dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize("op", ["minimum", "maximum"])
def test_nan_propagates(op: str, dtype: torch.dtype) -> None:
    nan, allreduce_min, most = float("nan"), float("-inf"), float("inf")
    rows = [[nan, 1.0, 1.0, allreduce_min], [1.0, nan, 1.0, most], [allreduce_min, most, nan, 0.0]]
    views = [arithmetic_of(dtype, op).view(memory(torch.tensor(row, dtype=dtype))) for row in rows]
    perform(arithmetic_of(dtype, op).reduce(views, views[1]))
    result = torch.as_tensor(views[1])
    assert result[:3].isnan().all()
    assert result[3].item() == (allreduce_min if op == "minimum" else most)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_halves_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    """One and many small numbers: in the dtype itself each of them would be lost."""
    small = torch.finfo(dtype).eps / 4
    values = [torch.ones(1), *[torch.full((1,), small)] * 8]
    views = [arithmetic_of(dtype).view(memory(value.to(dtype))) for value in values]
    perform(arithmetic_of(dtype).reduce(views, views[0]))
    assert views[0].item() == 1 + 8 * small
    one_by_one = torch.ones(1, dtype=dtype)
    for value in values[1:]:
        one_by_one += value.to(dtype)
    assert one_by_one.item() == 1


def test_reduce_of_empty_views() -> None:
    for dtype in DTYPES:
        views = [arithmetic_of(dtype).view(bytearray()) for _ in range(3)]
        perform(arithmetic_of(dtype).reduce(views, views[1]))
        assert [len(view) for view in views] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_copy(dtype: torch.dtype) -> None:
    buffer, values = bytearray(3 * dtype.itemsize), torch.tensor([0.0, float("nan"), 2.0], dtype=dtype)
    mover = mover_of(dtype)
    mover.view(buffer)[:] = mover.view(memory(values))
    assert buffer == memory(values)
    assert np.frombuffer(buffer, mover.view(buffer).dtype)[2] == 2


def test_an_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(TensorError, match=r"a tensor of complex64 by 'sum'; can reduce float64, .*, bool, .*bfloat16"):
        arithmetic_of(torch.complex64)
    with pytest.raises(TensorError, match=r"a tensor of float32 by 'xor'; can reduce int64, int32, .*, bool$"):
        arithmetic_of(torch.float32, "xor")


def test_an_unknown_op_lists_the_known() -> None:
    with pytest.raises(UsageError, match="there is no op 'average'; there are sum, product, minimum, maximum, and, or"):
        arithmetic_of(torch.float32, "average")


@pytest.mark.parametrize("op", NUMPY_OPS)
@pytest.mark.parametrize("own", [0, 1, 2, 4])
def test_the_target_may_be_another_view_of_a_source_s_memory(op: str, own: int) -> None:
    for dtype in dtypes_of(op):
        arithmetic = arithmetic_of(dtype, op)
        values = [contribution(rank, dtype) for rank in range(5)]
        buffers = [memory(value) for value in values]
        perform(arithmetic.reduce([arithmetic.view(buffer) for buffer in buffers], arithmetic.view(buffers[own])))
        assert buffers[own] == memory(serial(op, values)), dtype


@pytest.mark.parametrize("ranks", [2, 3])
def test_overflows_are_not_reported_with_any_numpy_setting(ranks: int) -> None:
    """PyTorch says nothing of them; mixed precision overflows as a matter of course."""
    views = [np.full(3, 3e38, np.float32) for _ in range(ranks)]
    steps = arithmetic_of(torch.float32).reduce(views, views[0])
    with np.errstate(all="raise"):
        perform(steps)
        assert np.geterr()["over"] == "raise"
    assert views[0].tolist() == [float("inf")] * 3


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_at_any_address(dtype: torch.dtype, length: int) -> None:
    arithmetic, nbytes = arithmetic_of(dtype), length * dtype.itemsize
    views = [arithmetic.view(memoryview(bytearray(nbytes + 1))[1:]) for _ in range(2)]
    for index, view in enumerate(views):
        view[:] = index + 1
    perform(arithmetic.reduce(views, views[0]))
    assert views[0].tolist() == [3] * length
