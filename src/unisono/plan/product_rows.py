"""Measured product that stands for a layer's: the nearest of a machine's rows of the same kind.

A layer's forward pass is a product (rows, inner) @ (inner, columns), of which a trace has the sums:

    activations = rows columns        FLOPs = 2 rows inner columns        weights = inner columns

    distance² = ln² of the ratios of rows, inner, columns, and of the kernel's area

Worked example: Linear(1000, 1000) for 8 samples: 8,000 outputs, 16 MFLOP, a million weights: inner 1,000, columns
1,000, rows 8. Of rows measured for (8, 1024, 1024) and (64, 1024, 1024) the first is nearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

from unisono.plan.measured_rows import CONVOLUTION_KIND, LINEAR_KIND, ProductRow
from unisono.plan.trace import TracedLayer


class ProductShape(NamedTuple):
    """Product (rows, inner) @ (inner, columns) of a layer. Its sizes are at least 1."""

    kind: str
    rows: float
    inner: float
    columns: float
    kernel: float


def shape_of_product(layer: TracedLayer, scale: float = 1.0) -> ProductShape | None:
    """Return the product of a traced layer's forward pass, with `scale` times as many samples; None for a layer that is
    neither linear nor a convolution.

    A bias counts as weights, so columns are too many by one for each input: less than a percent from 100 inputs on.
    """
    kind = {"Linear": LINEAR_KIND}.get(layer.kind, CONVOLUTION_KIND if layer.kind.startswith("Conv") else "")
    if not kind or not layer.forward_flops or not layer.activations or not layer.parameters:
        return None
    inner = layer.forward_flops / (2 * layer.activations)
    columns = max(1.0, layer.parameters / inner)
    rows = max(1.0, layer.activations / columns * scale)
    channels = layer.input_shapes[0][1] if kind == CONVOLUTION_KIND and len(layer.input_shapes[0]) > 1 else inner
    return ProductShape(kind, rows, inner, columns, max(1.0, inner / channels))


def nearest_product(rows: Sequence[ProductRow], shape: ProductShape) -> ProductRow | None:
    """Return the measured product of the same kind with the least distance; of equals, the first. None without any."""

    def distance(row: ProductRow) -> float:
        pairs = zip((row.rows, row.inner, row.columns, row.kernel), shape[1:], strict=True)
        return sum(log(measured / wanted) ** 2 for measured, wanted in pairs)

    return min((row for row in rows if row.kind == shape.kind), key=distance, default=None)
