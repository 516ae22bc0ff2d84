"""The number format of a step."""

import pytest
import torch

from unisono.compute.precision import check, choose, products_in
from unisono.compute.processor import Processor
from unisono.errors import UsageError

PLAIN, TILES = Processor("plain"), Processor("new", tiles=True)
FLOAT, SHORT, DOUBLE = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize(
    ("asked", "weights", "device", "processor", "chosen"),
    [
        ("auto", FLOAT, "cpu", PLAIN, FLOAT),
        ("auto", FLOAT, "cpu", TILES, SHORT),
        ("auto", FLOAT, "cuda", PLAIN, SHORT),
        ("float32", FLOAT, "cuda", TILES, FLOAT),
        ("bfloat16", FLOAT, "cpu", PLAIN, SHORT),
        ("bfloat16", DOUBLE, "cpu", TILES, DOUBLE),
    ],
)
def test_what_is_chosen(
    asked: str, weights: torch.dtype, device: str, processor: Processor, chosen: torch.dtype
) -> None:
    assert choose(asked, weights, device, processor) == chosen


@pytest.mark.parametrize("dtype", [FLOAT, SHORT])
def test_products_are_made_in_it(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(3, 2)
    with products_in(dtype, FLOAT, "cpu"):
        outputs = layer(torch.ones(1, 3))
    assert outputs.dtype == dtype
    outputs.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == FLOAT


def test_what_is_none_is_refused() -> None:
    check("auto")
    with pytest.raises(UsageError, match="precision 'float8'; there are auto, float32, bfloat16"):
        check("float8")
