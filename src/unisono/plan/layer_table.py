"""Layers of a planned run as a table: what each computes and exchanges, and how it is parallel.

    layer         kind    GFLOP   weights  parallelism  computing  gradients  activations      sent
    features.8    Conv2d  2,841   2.36 MB  data         118.12 ms    3.54 ms      0.00 ms  4.426 MB
    classifier.1  Linear  157.8  411.1 MB  row 16         8.44 ms    0.00 ms      8.80 ms  10.87 MB

Worked example: two layers of VGG-A, 256 images on 16 nodes of `aws_c4_8xlarge`. Columns:

    computing      seconds of its three passes on a rank
    gradients      seconds of their exchange, hidden or not
    activations    seconds of theirs, which are waited for; 0 in data parallelism
    sent           bytes that a rank sends for both

Layers without parameters and FLOPs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from unisono.plan.layer_costs import product_seconds
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_plan import inputs_of
from unisono.plan.split import SplitInputs, sent_of
from unisono.plan.split_plan import split_inputs
from unisono.plan.text_table import text_table
from unisono.rules import BSP

DATA = "data"
"""Parallelism of a layer that is not split."""

HEAD = ("layer", "kind", "GFLOP", "weights", "parallelism", "computing", "gradients", "activations", "sent")


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
    gradients: float
    activations: float
    sent: float
    """Bytes that a rank sends in a step."""


def layers_of(run: PlannedRun, splits: Mapping[str, str]) -> list[PlannedLayer]:
    """Return the layers of a run with these splits, exchanged as gradients by an allreduce.

    The run has a model to split.
    """
    assert run.split is not None
    plain = replace(run, rule=BSP())
    return planned_layers(run, split_inputs(plain, inputs_of(plain, plain.exchange.cost), run.split), splits)


def planned_layers(run: PlannedRun, inputs: SplitInputs, splits: Mapping[str, str]) -> list[PlannedLayer]:
    """Return the layers with parameters or FLOPs in the order of the forward pass."""
    by_name = {layer.name: layer for layer in run.layers}
    samples = inputs.samples * inputs.links.placement.ranks
    seconds = sum(product_seconds(layer, layer.flops, run.machine) for layer in run.layers)
    found = list[PlannedLayer]()
    for facts in inputs.layers:
        layer = by_name.get(facts.name)
        if layer is None or not (layer.flops or layer.parameters):
            continue
        sent = sent_of(inputs, facts, splits.get(facts.name))
        share = product_seconds(layer, layer.flops, run.machine) / seconds if seconds else 0.0
        found.append(
            PlannedLayer(
                facts.name or "(model)",
                layer.kind,
                layer.flops * samples / run.traced,
                facts.weights,
                splits.get(facts.name, DATA),
                inputs.step.computing.whole * share,
                sent.gradients,
                sent.activations,
                sent.gradient_bytes + sent.activation_bytes,
            )
        )
    return found


def layer_lines(rows: Sequence[PlannedLayer]) -> Iterator[str]:
    """Yield the table, a line each."""
    yield from text_table([HEAD, *(_cells(row) for row in rows)], left={0, 1, 4})


def _cells(row: PlannedLayer) -> tuple[str, ...]:
    return (
        row.name,
        row.kind,
        f"{row.flops / 1e9:,.4g}",
        f"{row.weights / 1e6:,.4g} MB",
        row.parallelism,
        *(f"{one * 1e3:,.2f} ms" for one in (row.computing, row.gradients, row.activations)),
        f"{row.sent / 1e6:,.4g} MB",
    )
