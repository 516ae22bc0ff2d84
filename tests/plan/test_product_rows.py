"""The shape of a traced layer's product, and the measured product that is nearest to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.plan.measured_rows import ProductRow
from unisono.plan.product_rows import nearest_product, shape_of_product
from unisono.plan.trace import TracedLayer, trace


def row(kind: str, rows: int, inner: int, columns: int, kernel: int = 1) -> ProductRow:
    return ProductRow(kind, rows, inner, columns, kernel, 1e9, 2e9, 0.0)


def traced(layer: nn.Module, *shape: int) -> TracedLayer:
    (found,) = trace(layer, torch.empty(shape))
    return found


def test_the_worked_example() -> None:
    shape = shape_of_product(traced(nn.Linear(1000, 1000, bias=False), 8, 1000))
    assert shape == ("linear", pytest.approx(8), pytest.approx(1000), pytest.approx(1000), 1)
    rows = [row("linear", 64, 1024, 1024), row("linear", 8, 1024, 1024), row("convolution", 8, 1000, 1000)]
    assert nearest_product(rows, shape) == rows[1]
    assert nearest_product(rows[2:], shape) is None


def test_more_samples_than_were_traced_are_more_rows() -> None:
    layer = traced(nn.Linear(1000, 1000), 2, 1000)
    rows = [row("linear", 8, 1024, 1024), row("linear", 64, 1024, 1024)]
    found = [nearest_product(rows, shape) for scale in (1, 30) if (shape := shape_of_product(layer, scale))]
    assert found == rows


def test_a_convolution_has_its_kernel() -> None:
    layer = traced(nn.Conv2d(64, 128, 3, padding=1, bias=False), 2, 64, 10, 10)
    shape = shape_of_product(layer)
    assert shape is not None
    assert shape[1:] == pytest.approx((200, 64 * 9, 128, 9))
    wide = traced(nn.Conv2d(576, 128, 1, bias=False), 2, 576, 10, 10)
    rows = [row("convolution", 200, 576, 128, 9), row("convolution", 200, 576, 128, 1)]
    assert [nearest_product(rows, one) for one in map(shape_of_product, (layer, wide)) if one] == rows


def test_other_layers_have_no_such_product() -> None:
    assert shape_of_product(traced(nn.ReLU(), 2, 3)) is None
    (attention,) = trace(nn.MultiheadAttention(8, 2), *(torch.empty(2, 3, 8),) * 3)[:1]
    assert shape_of_product(attention) is None
