import numpy as np
import pytest
import torch

from unisono.errors import TensorError
from unisono.transports.arithmetic import ARITHMETICS, HALF_DTYPES, arithmetic_of, perform


def memory(dtype: torch.dtype, values: torch.Tensor) -> bytearray:
    return bytearray(values.to(dtype).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", ARITHMETICS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("own", [None, 0, 1, 4])
def test_total_leaves_all_but_its_target_alone(dtype: torch.dtype, ranks: int, own: int | None) -> None:
    if own is not None and own >= ranks:
        pytest.skip("no such rank")
    arithmetic = arithmetic_of(dtype)
    values = [torch.randint(0, 9, (37,), generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    buffers = [memory(dtype, value) for value in values]
    views = [arithmetic.view(buffer) for buffer in buffers]
    target_buffer = memory(dtype, torch.zeros(37)) if own is None else buffers[own]
    target = arithmetic.view(target_buffer) if own is None else views[own]
    perform(arithmetic.total(views, target))
    assert target_buffer == memory(dtype, sum(values))
    for rank, (buffer, value) in enumerate(zip(buffers, values, strict=True)):
        assert rank == own or buffer == memory(dtype, value)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_halves_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    """One and many small numbers: in the dtype itself each of them would be lost."""
    small = torch.finfo(dtype).eps / 4
    values = [torch.ones(1), *[torch.full((1,), small)] * 8]
    views = [arithmetic_of(dtype).view(memory(dtype, value)) for value in values]
    perform(arithmetic_of(dtype).total(views, views[0]))
    assert views[0].item() == 1 + 8 * small
    one_by_one = torch.ones(1, dtype=dtype)
    for value in values[1:]:
        one_by_one += value.to(dtype)
    assert one_by_one.item() == 1


def test_nothing_is_a_length_too() -> None:
    for dtype in ARITHMETICS:
        views = [arithmetic_of(dtype).view(bytearray()) for _ in range(3)]
        perform(arithmetic_of(dtype).total(views, views[1]))
        assert [len(view) for view in views] == [0, 0, 0]


def test_copy() -> None:
    into = np.zeros(3)
    perform([arithmetic_of(torch.float64).copy(into, np.arange(3.0))])
    assert into.tolist() == [0, 1, 2]


def test_an_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(TensorError, match=r"cannot sum a tensor of complex64; can sum float64, .*bfloat16"):
        arithmetic_of(torch.complex64)
