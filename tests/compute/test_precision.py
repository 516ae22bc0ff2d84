"""The number format of a step."""

import pytest
import torch

from unisono.compute.precision import autocast_to, check_precision, choose_dtype
from unisono.errors import UsageError
from unisono.processor_model import Processor

PLAIN, AMX = Processor("plain"), Processor("new", tiles=True)
FLOAT, BFLOAT16, DOUBLE = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize(
    ("requested", "weights", "device", "processor", "chosen"),
    [
        ("auto", FLOAT, "cpu", PLAIN, FLOAT),
        ("auto", FLOAT, "cpu", AMX, BFLOAT16),
        ("auto", FLOAT, "cuda", PLAIN, BFLOAT16),
        ("float32", FLOAT, "cuda", AMX, FLOAT),
        ("bfloat16", FLOAT, "cpu", PLAIN, BFLOAT16),
        ("bfloat16", DOUBLE, "cpu", AMX, DOUBLE),
    ],
)
def test_the_dtype_of_products(
    requested: str, weights: torch.dtype, device: str, processor: Processor, chosen: torch.dtype
) -> None:
    assert choose_dtype(requested, weights, device, processor) == chosen


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16])
def test_products_are_computed_in_it(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(3, 2)
    with autocast_to(dtype, FLOAT, "cpu"):
        outputs = layer(torch.ones(1, 3))
    assert outputs.dtype == dtype
    outputs.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == FLOAT


def test_an_unknown_precision_is_refused() -> None:
    check_precision("auto")
    with pytest.raises(UsageError, match="precision 'float8'; there are auto, float32, bfloat16"):
        check_precision("float8")
