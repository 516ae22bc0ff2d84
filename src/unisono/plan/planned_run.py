"""Run that is planned: a traced model, a rule and their settings on nodes of a machine, checked before a prediction.

    minibatch 256, 4 nodes, 2 ranks a node     ─▶  64 samples for a node, 32 for a rank

Here is what it takes by itself: computing and memory; loading is in `loading.py`, exchanges in `collective_costs.py`.

**Computing**, seconds of traced layers on a machine:

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

**Memory** of a rank (parts: `docs/planning.md`). Worked example: 4 ranks, 100 MB of weights, as many of gradients,
AdamW, 8 samples whose outputs of all layers take 50 MB each: 100 + 100 + 200 + 400 = 800 MB. Sharded, the optimizer has
50 MB: 650 MB. By local SGD rank 0 gathers 4 * 300 MB at checkpoints: 400 + 1,200 MB. Known limits: outputs that a layer
changes in place count, views do not; working memory of convolutions and fragments in flight are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import ceil, log
from typing import NamedTuple

import torch

from unisono.errors import UsageError
from unisono.network.choice import LIBRARY
from unisono.optimizers import make_optimizer
from unisono.plan.collective_costs import ExchangeCost, exchange_cost
from unisono.plan.layer_plan import PART, Split
from unisono.plan.loading import Loading, SampleFacts, held_bytes, loading_of
from unisono.plan.machines import CONVOLUTION_KIND, LINEAR_KIND, EfficiencyFacts, MachineFacts, ProductRow, check_ranks
from unisono.plan.split import SplitInputs, SplitModel
from unisono.plan.trace import TracedLayer
from unisono.rules import BaseRule
from unisono.step.costs import Computing
from unisono.step.rule import Members, RankState
from unisono.wires import EXACT, encoded_share

LINEAR = "Linear"
"""Kind of layers whose products have the efficiency of linear ones."""


@dataclass(frozen=True)
class PlannedRun:
    """Run on a number of nodes; `dataclasses.replace` gives it on others."""

    machine: MachineFacts
    layers: Sequence[TracedLayer]
    traced: int
    """Samples that the layers were traced for."""
    rule: BaseRule
    minibatch: int
    """Samples of a step, over all ranks."""
    nodes: int = 1
    ranks_per_node: int = 1
    rule_name: str = "bsp"
    kept: float = 1.0
    """Numbers that the optimizer keeps for each weight."""
    clip: float | None = None
    """Largest norm of all gradients together."""
    layer_norms: bool = False
    """True where the optimizer's step needs norms of whole layers."""
    samples: SampleFacts = field(default_factory=SampleFacts)
    epoch_samples: int | None = None
    """Training samples of an epoch; None: not known."""
    test_samples: int = 0
    epochs: int = 1
    checkpoint_every: int = 0
    """Steps between two checkpoints within an epoch; 0: there are none."""
    checkpoint_minutes: float = 0.0
    """Minutes between two further checkpoints; 0: there are none."""
    autotunes: bool = False
    """True where convolutions are timed before the first step."""
    split: SplitModel | None = None
    """Model whose layers can be split; None: no layer is."""
    virtual_ranks: int = 0
    """Equal parts of a step's samples, which the ranks share; 0: each sample is one."""
    notes: tuple[str, ...] = ()
    """Lines on what the numbers count, or leave out, of how it computes."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def samples_of_rank(self) -> int:
        """Samples of a step on the rank that has most."""
        return self._most_samples(self.ranks)

    @property
    def loading(self) -> Loading:
        """Loading of a step's samples on the node that has most."""
        return loading_of(self.machine, self.samples, self._most_samples(self.nodes), self.ranks_per_node)

    def _most_samples(self, holders: int) -> int:
        parts = self.virtual_ranks or self.minibatch
        return ceil(parts / holders) * self.minibatch // parts

    @property
    def wire(self) -> str | None:
        """Number format of what is exchanged between nodes; None for its own, in which the library sends it."""
        wire, rule = self.rule.exchange.wire, self.rule
        plain = rule.algorithm == LIBRARY or (self.nodes == 1 and not rule.traits.state.has_anchor)
        return None if plain and wire != EXACT else wire

    @cached_property
    def exchange(self) -> ExchangeCost:
        """Cost of the rule's exchanges."""
        kind = self.wire, self.rule.traits.state is RankState.SHARDED, self.rule.algorithm
        return exchange_cost(self.machine, self.nodes, self.ranks_per_node, *kind)


def check_run(run: PlannedRun) -> None:
    """Raise UsageError for a run that cannot be made, or that cannot be predicted."""
    machine, node = run.machine, run.machine.node
    check_ranks(run.ranks)
    if run.minibatch < run.ranks:
        raise UsageError(
            f"a minibatch of {run.minibatch} is less than a sample for each of {run.ranks} ranks: "
            f"plan a minibatch of {run.ranks}, or fewer nodes"
        )
    if not node.flops:
        raise UsageError(f"{machine.name} has no node.flops: give a file with the FLOPs per second of a node")
    if not machine.link.bandwidth and run.nodes > 1:
        raise UsageError(
            f"{machine.name} has no link.bandwidth: give a file with the bytes per second of an adapter; add to it: "
            "[link] bandwidth = 1.25e9 (10 Gbit/s), latency = 25e-6"
        )
    if not any(layer.gradient_bytes for layer in run.layers):
        raise UsageError("the model has no parameters that are trained, so there is nothing to exchange: plan another")
    if not any(layer.flops for layer in run.layers) and not (node.memory_bandwidth or node.device_bandwidth):
        raise UsageError(
            f"none of the model's layers makes a product, and {machine.name} has no node.memory_bandwidth, so a step "
            "has no predicted time: add to its file the bytes per second of a node's memory"
        )
    if run.rule.traits.members is Members.SERVERS:
        raise UsageError(
            f"rule {run.rule_name} has no step that all ranks make together, so it is not predicted: plan bsp, "
            "sharded, local_sgd or diloco, or measure a short run of it"
        )


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
    kind = {LINEAR: LINEAR_KIND}.get(layer.kind, CONVOLUTION_KIND if layer.kind.startswith("Conv") else "")
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


def product_seconds(
    layer: TracedLayer, flops: float, machine: MachineFacts, direction: str = "step", scale: float = 1.0
) -> float:
    """Return the seconds of FLOPs of this layer on one node, where a rank has `scale` times the traced samples: of its
    "forward" or "backward" pass, or of both in a "step"."""
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
    """Return the times of a step on one of a node's ranks, which share its computing, for `samples` samples, of layers
    traced for `traced`. The trained parameters of a layer count as one."""
    scale = samples / traced
    of_node = scale * ranks_per_node
    forward = [product_seconds(layer, layer.forward_flops, machine, "forward", scale) * of_node for layer in layers]
    backward = [product_seconds(layer, layer.backward_flops, machine, "backward", scale) * of_node for layer in layers]
    return computing_in_order(forward, backward, [index for index, layer in enumerate(layers) if layer.gradient_bytes])


def computing_in_order(forward: Sequence[float], backward: Sequence[float], of: Sequence[int]) -> Computing:
    """Return the times of a step from the seconds of each layer's passes; `of` has the layers that are trained."""
    begins = [0.0, *accumulate(forward)]
    ends = list(accumulate(reversed(backward), initial=begins[-1]))[:0:-1]
    total = begins[-1] + sum(backward)
    return Computing(tuple(begins[layer] for layer in of), tuple(ends[layer] for layer in of), total)


class RankMemory(NamedTuple):
    """Bytes of a rank, by use."""

    weights: float
    gradients: float
    optimizer: float
    anchor: float
    activations: float
    samples: float = 0.0
    """Encoded samples, where they are in memory."""
    outer: float = 0.0
    """Momentum of an outer optimizer, and errors of quantized changes."""
    gathered: float = 0.0
    """States of all ranks that rank 0 gathers for a checkpoint, where they differ."""

    @property
    def total(self) -> float:
        """Bytes of all uses at once: of activations and what is gathered, the larger."""
        return sum(self) - min(self.activations, self.gathered)


def rank_memory(run: PlannedRun) -> RankMemory:
    """Return the memory of a rank of a run whose layers are whole."""
    state, weights = run.rule.traits.state, float(sum(layer.parameter_bytes for layer in run.layers))
    gradients = float(sum(layer.gradient_bytes for layer in run.layers))
    activations = sum(layer.activation_bytes for layer in run.layers) * run.samples_of_rank / run.traced
    optimizer = gradients * run.kept / (run.ranks if state is RankState.SHARDED else 1)
    held = held_bytes(run.samples, run.epoch_samples, run.nodes, run.ranks)
    anchor, outer = gradients if state.has_anchor else 0.0, 0.0
    if state.has_anchor:  # residuals of its changes, and of its part of the sum (`rules/outer.py`)
        rounded = (1 + 1 / run.ranks) * (encoded_share(run.rule.exchange.wire) != 1)
        outer = gradients * (rounded + (getattr(run.rule, "outer_momentum", 0) > 0))
    gathered = run.ranks * (weights + optimizer + anchor + outer) if state.differs else 0.0
    return RankMemory(weights, gradients, optimizer, anchor, activations, held, outer, gathered)


def memory_with(splits: Mapping[str, Split], unsplit: RankMemory, inputs: SplitInputs) -> RankMemory:
    """Return the memory of a rank with these splits, from that without: of weights its parts, and all that is whole; a
    sharded optimizer stays. A split layer keeps its group's inputs, or its part of them, for the backward pass."""
    by_name = {layer.name: layer for layer in inputs.layers}
    total = weights = float(sum(inputs.weights.values()))
    kept = 0.0
    for name, split in splits.items():
        layer, size = by_name[name], split.ranks
        weights -= inputs.weights.get(name, 0) * (1 - 1 / size)
        kept += layer.input_bytes * inputs.scale * (size if layer.takes_whole(split) else split.takes != PART)
    keys = ["gradients"] + ["optimizer"] * (inputs.step.rule.traits.state is not RankState.SHARDED)
    scaled = {key: getattr(unsplit, key) * weights / total for key in keys}
    return unsplit._replace(weights=unsplit.weights - total + weights, activations=unsplit.activations + kept, **scaled)


def numbers_kept(optimizer: str, momentum: float) -> float:
    """Return how many numbers the optimizer of that name keeps for each weight: those after a step of a small weight.

    Raises UsageError, listing the names, for an unknown one.

    >>> numbers_kept("sgd", 0.9), numbers_kept("adamw", 0.9)
    (1.0, 2.0)
    """
    model = torch.nn.Linear(8, 8, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    made = make_optimizer(optimizer, model, 0.1, momentum, 0.0)
    made.step()
    kept = [tensor for tensor in made.state[model.weight].values() if isinstance(tensor, torch.Tensor) and tensor.ndim]
    return sum(tensor.numel() for tensor in kept) / model.weight.numel()
