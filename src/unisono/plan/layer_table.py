"""Layers of a planned run as a table: what each computes and exchanges, and how it is parallel.

    layer         kind    GFLOP   weights  parallelism  computing  exchange  activations   G  sent at G and beside it
    features.8    Conv2d  2,841   2.36 MB  data         118.12 ms   3.73 ms      0.00 ms  64  63: 30.74 MB, 64: 4.719 MB
    classifier.1  Linear  157.8  411.1 MB  row 4          2.11 ms  154.8 ms      1.38 ms   1  1: 51.38 MB, 2: 51.38 MB

Worked example: two layers of VGG-A, 256 images on 64 nodes of `aws_c4_8xlarge`, split in groups of 4. Columns:

    computing      seconds of its three passes on a rank
    exchange       seconds of its gradients, hidden or not
    activations    seconds of theirs, which are waited for; 0 in data parallelism
    G              number of groups in which all nodes send least, by PCL-DNN 3.3 (`hybrid.py`); with it, the bytes of
                   G - 1, G and G + 1 groups. N groups of one node are data parallelism, one group is model parallelism

Layers without parameters and FLOPs are left out. G is of bytes alone; the splits are those of the fastest step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from unisono.plan.hybrid import hybrid_volume, whole_groups
from unisono.plan.split import SplitCandidate, SplitInputs, layer_seconds
from unisono.plan.trace import TracedLayer

DATA = "data"
"""Parallelism of a layer that is not split."""

HEAD = (
    *("layer", "kind", "GFLOP", "weights", "parallelism", "computing", "exchange", "activations", "G"),
    "sent at G and beside it",
)


class PlannedLayer(NamedTuple):
    """Layer in a step on a number of nodes."""

    name: str
    kind: str
    flops: float
    """FLOPs of a step on all nodes."""
    weights: int
    """Bytes of its parameters."""
    parallelism: str
    """"data", or its split in words of a parallel plan."""
    computing: float
    exchange: float
    activations: float
    groups: int | None
    """Number of groups that sends least; None for a layer that cannot be split."""
    sent: Mapping[int, float]
    """Bytes of a step on one node, by the number of groups."""


def planned_layers(
    layers: Sequence[TracedLayer], traced: int, inputs: SplitInputs, chosen: SplitCandidate
) -> list[PlannedLayer]:
    """Return the layers with parameters or FLOPs, traced for `traced` samples, in the order of the forward pass."""
    by_name = {layer.name: layer for layer in layers}
    found = list[PlannedLayer]()
    for facts in inputs.layers:
        layer = by_name.get(facts.name)
        if layer is None or not (layer.flops or layer.parameters):
            continue
        seconds = layer_seconds(inputs, facts, chosen.splits.get(facts.name), chosen.size)
        groups = None if facts.shape is None else whole_groups(facts.shape, inputs.samples, inputs.ranks)
        sent = dict[int, float]()
        if facts.shape is not None and groups is not None:
            beside = [one for one in (groups - 1, groups, groups + 1) if 1 <= one <= inputs.ranks]
            sent = {one: sum(hybrid_volume(facts.shape, inputs.samples, inputs.ranks, one)) for one in beside}
        found.append(
            PlannedLayer(
                facts.name or "(model)",
                layer.kind,
                layer.flops * inputs.samples / traced,
                facts.weights,
                chosen.words.get(facts.name, DATA),
                seconds.computing,
                seconds.gradients,
                seconds.activations,
                groups,
                sent,
            )
        )
    return found


def layer_lines(rows: Sequence[PlannedLayer]) -> Iterator[str]:
    """Yield the table, a line each."""
    cells = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = {0, 1, 4, len(HEAD) - 1}
    for line in cells:
        padded = (
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


def _cells(row: PlannedLayer) -> tuple[str, ...]:
    seconds = (f"{one * 1e3:,.2f} ms" for one in (row.computing, row.exchange, row.activations))
    return (
        row.name,
        row.kind,
        f"{row.flops / 1e9:,.4g}",
        f"{row.weights / 1e6:,.4g} MB",
        row.parallelism,
        *seconds,
        "-" if row.groups is None else str(row.groups),
        ", ".join(f"{groups}: {nbytes / 1e6:,.4g} MB" for groups, nbytes in row.sent.items()),
    )
