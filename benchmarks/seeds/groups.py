"""Bytes of data, model and hybrid parallelism for one layer, and the time of the second: PCL-DNN sections 3.2 and 3.3.

N nodes in G groups of N / G. Nodes of a group split the layer, the same nodes of all groups share a part's gradients:

    G = 1        model parallelism     activations of the whole minibatch
    1 < G < N    hybrid                activations of minibatch / G samples, G / N of the weights
    G = N        data parallelism      the weights

    hybrid(G) = 2 size ifm iw ih minibatch / G + size ofm ifm kw kh (2 - overlap) G / N       the first alone at G = 1
    G         = sqrt(2 N iw ih minibatch / (ofm kw kh (2 - overlap)))                         where its derivative is 0

The forward pass of model parallelism, without overlap, with ifm_b = ifm / N maps of its inputs on each node:

    received  = size ifm_b iw ih minibatch (N - 1)          the maps of the other nodes
    sent      = size ifm_b iw ih minibatch                  its own; together size ifm iw ih minibatch
    computing = 2 ifm ofm / N kw kh ow oh minibatch         N blocks of ifm_b ofm_b maps
    seconds   = computing / comp_sys + (received + sent) / comms_sys + latency

A fully connected layer, 4,096 ─▶ 4,096, minibatch 256, N = 4, overlap 0, size 4: the closed form gives G = 0.5. G = 1
sends 8 * 4,096 * 256 B = 8.4 MB, G = 2 sends 71.3 MB, and G = 4 134.2 MB.

For its own example (ofm 4,096, minibatch 256, N = 64) the section prints G = 3. Its equation gives G = 2, where hybrid
and model parallelism send the same; with overlap = 1 it gives G = 2.8, and 3 groups send less than 1, 2 or 4.

The section prints 8 ifm 213 for G = 3, where its equation gives 8 ifm 277. 213 is what nodes send: a part-reduce and a
part-broadcast leave each its own part, so (G - 1) / G of the weights: 256 / 3 + 192 * 2 / 3 (`moved_hybrid_bytes`).
"""

from __future__ import annotations

from math import ceil, floor, sqrt
from typing import NamedTuple

from benchmarks.seeds.overlap import Machine


class LayerShape(NamedTuple):
    """Sizes of a layer, in PCL-DNN's terms. A fully connected layer has a kernel and an area of 1."""

    ifm: int
    """Input feature maps, or features."""
    ofm: int
    """Output feature maps, or features."""
    kernel: int = 1
    """Elements of a kernel: kw * kh."""
    area: int = 1
    """Elements of an input feature map of a sample: inputw * inputh."""
    out_area: int = 1
    """Elements of an output feature map of a sample: outputw * outputh."""


def model_forward_bytes(shape: LayerShape, minibatch: float, nodes: int, size: int = 4) -> tuple[float, float]:
    """Return the bytes that a node receives and sends in a forward pass of model parallelism (3.2)."""
    held = size * shape.ifm / nodes * shape.area * minibatch
    return held * (nodes - 1), held


def model_forward_seconds(
    shape: LayerShape, minibatch: float, nodes: int, machine: Machine, latency: float, size: int = 4
) -> float:
    """Return the time of a forward pass of model parallelism without overlap (3.2). `latency` is in seconds."""
    computing = 2 * shape.ifm * shape.ofm / nodes * shape.kernel * shape.out_area * minibatch
    moved = sum(model_forward_bytes(shape, minibatch, nodes, size))
    return computing / machine.computing + moved / machine.communication + latency


def prefers_model_parallelism(shape: LayerShape, minibatch: float, overlap: float = 0.0) -> bool:
    """Return True where model parallelism sends less: ofm kw kh (2 - overlap) > inputw inputh minibatch (3.2).

    `minibatch` is the number of samples of a step on all nodes, `overlap` the share of sends beside receives, 0 to 1.
    """
    return shape.ofm * shape.kernel * (2 - overlap) > shape.area * minibatch


def hybrid_bytes(
    shape: LayerShape, minibatch: float, nodes: int, groups: int, overlap: float = 0.0, size: int = 4
) -> float:
    """Return the bytes of a step with `groups` groups (3.3). `size` is that of an element in bytes."""
    activations = 2 * size * shape.ifm * shape.area * minibatch / groups
    weights = size * shape.ofm * shape.ifm * shape.kernel * (2 - overlap) * groups / nodes
    if groups == 1:
        return activations
    return weights if groups == nodes else activations + weights


def moved_hybrid_bytes(
    shape: LayerShape, minibatch: float, nodes: int, groups: int, overlap: float = 0.0, size: int = 4
) -> float:
    """Return the bytes of a step with `groups` groups, without those of its own part, which a node need not send."""
    activations = hybrid_bytes(shape, minibatch, nodes, 1, overlap, size) / groups
    return activations + (groups - 1) / groups * hybrid_bytes(shape, 0, nodes, groups, overlap, size)


def whole_groups(shape: LayerShape, minibatch: float, nodes: int, overlap: float = 0.0) -> int:
    """Return the number of groups that sends least, whether or not it divides the nodes; of equals, the fewest.

    Between the ends the volume is convex, so no whole number is better than a neighbour of the ideal.
    """
    ideal = sqrt(2 * nodes * shape.area * minibatch / (shape.ofm * shape.kernel * (2 - overlap)))
    ideal = min(max(ideal, 1), nodes)
    near = sorted({1, floor(ideal), ceil(ideal), min(2, nodes), max(1, nodes - 1), nodes})
    return min(near, key=lambda groups: hybrid_bytes(shape, minibatch, nodes, groups, overlap))
