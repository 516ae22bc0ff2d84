"""Seconds of traced layers on a machine.

    seconds = FLOPs / (peak FLOPs per second * efficiency of the kind of product)
    seconds = FLOPs / FLOPs per second of the nearest measured product          where the machine file has rows of it
    seconds = share of FLOPs of the network / samples per second of the network     if it has a row of it (`at_rate_of`)

    Linear          efficiency.linear
    all others      efficiency.convolution

Only products take time: layers that read and write alone are free here, so a prediction is a lower bound.

Worked example: Linear(1000, 1000) for 8 samples makes 16 MFLOP forward and 32 backward, 6 MFLOP a sample. A node of 1
TFLOP/s, 60% efficient at it, takes 10 us a sample.

For a step, layers follow one another, forward and then backward (`computing_of`):

    computing   0 ──layer 0──layer 1──layer 2──▶│◀──layer 2────layer 1────layer 0─── whole
    needed      w0       w1       w2            ready       w2         w1         w0

The measured product that stands for a layer's is the nearest of its kind. A layer's forward pass is a product (rows,
inner) @ (inner, columns), of which a trace has the sums:

    activations = rows columns        FLOPs = 2 rows inner columns        weights = inner columns

    distance² = ln² of the ratios of rows, inner, columns, and of the kernel's area

Worked example: Linear(1000, 1000) for 8 samples: 8,000 outputs, 16 MFLOP, a million weights: inner 1,000, columns
1,000, rows 8. Of rows measured for (8, 1024, 1024) and (64, 1024, 1024) the first is nearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import log
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.plan.machines import CONVOLUTION_KIND, LINEAR_KIND, EfficiencyFacts, MachineFacts, ProductRow
from unisono.plan.trace import TracedLayer
from unisono.step.costs import Computing


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


LINEAR = "Linear"
"""Kind of layers whose products have the efficiency of linear ones."""


def product_seconds(
    layer: TracedLayer, flops: float, machine: MachineFacts, direction: str = "step", scale: float = 1.0
) -> float:
    """Return the seconds of FLOPs of this layer on one node.

    The rate is that of the nearest row of the machine (`nearest_product`) for a rank's `scale` times the traced
    samples: of its "forward" or "backward" pass, or of both in a "step". Without rows of its kind, the node's peak
    times the efficiency of the kind.
    """
    shape = shape_of_product(layer, scale) if machine.products else None
    row = nearest_product(machine.products, shape) if shape else None
    if row is not None:
        rate: float = getattr(row, direction)
        return flops / rate
    share = machine.efficiency.linear if layer.kind == LINEAR else machine.efficiency.convolution
    return flops / (machine.node.flops * share)


def at_rate_of(
    machine: MachineFacts, name: str, layers: Sequence[TracedLayer], traced: int, samples: float
) -> MachineFacts:
    """Return the machine at its measured rate of the network `name`, which all FLOPs then have; itself without a row.

    Of several rows, the one of the batch nearest by its ratio counts; `samples` are those of a node. The row is the
    only one that the machine keeps. Raises UsageError for a machine without FLOPs per second that has rows of others.
    """
    batch = samples / max(1, machine.node.accelerators)
    rows = [row for row in machine.networks if row.name == name]
    if not rows:
        if machine.networks and not machine.node.flops:
            known = ", ".join(dict.fromkeys(row.name for row in machine.networks))
            raise UsageError(
                f"{machine.name} has no node.flops, and no rate of this network on this input: plan {known} on the "
                "network's own input, or give a file with the FLOPs per second of a node"
            )
        return replace(machine, networks=())
    row = min(rows, key=lambda row: abs(log(row.batch / batch)))
    flops = row.samples_per_second * sum(layer.flops for layer in layers) / traced
    node, unused = replace(machine.node, flops=flops), ("node.flops", "efficiency.convolution", "efficiency.linear")
    assumed = {key: reason for key, reason in machine.assumed.items() if key not in unused}
    return replace(machine, node=node, efficiency=EfficiencyFacts(), assumed=assumed, networks=(row,), products=())


def computing_of(
    layers: Sequence[TracedLayer], machine: MachineFacts, traced: int, samples: int, ranks_per_node: int = 1
) -> Computing:
    """Return the times of a step on one of a node's ranks for `samples` samples, of layers traced for `traced`.

    The trained parameters of a layer count as one: needed when its forward pass begins, with a gradient when its
    backward pass ends. The backward pass goes through the layers in reverse order. Ranks of a node share its computing.
    """
    scale = samples / traced
    of_node = scale * ranks_per_node
    forward = [product_seconds(layer, layer.forward_flops, machine, "forward", scale) * of_node for layer in layers]
    backward = [product_seconds(layer, layer.backward_flops, machine, "backward", scale) * of_node for layer in layers]
    return computing_in_order(forward, backward, [at for at, layer in enumerate(layers) if layer.gradient_bytes])


def computing_in_order(forward: Sequence[float], backward: Sequence[float], of: Sequence[int]) -> Computing:
    """Return the times of a step from the seconds of each layer's passes; `of` has the layers that are trained."""
    begins = [0.0, *accumulate(forward)]
    ends = list(accumulate(reversed(backward), initial=begins[-1]))[:0:-1]
    whole = begins[-1] + sum(backward)
    return Computing(tuple(begins[number] for number in of), tuple(ends[number] for number in of), whole)
