"""Time of a layer's forward pass in model parallelism, and the volume of hybrid groups by part: PCL-DNN 3.2 and 3.3.

A node has ifm_b of the ifm input features, and ofm_b of the ofm outputs:

    features    │ node 0 │ node 1 │ node 2 │ node 3 │
    sent        size ifm_b iw ih minibatch                              each node's own features
    received    size ifm_b iw ih minibatch (ifm / ifm_b - 1)            those of all others
    both        size ifm iw ih minibatch
    block       2 ifm_b ofm_b kw kh ow oh minibatch FLOPs, of which a node has ifm / ifm_b: its outputs of all inputs
    forward     blocks / FLOP/s + both / bandwidth + latency                                nothing overlaps

Worked example: 4,096 to 4,096 features on 4 nodes, minibatch 256, float32. A node has 1,024 of each side: it sends
1.05 MB and receives 3.15 MB, 4.19 MB together. A block is 537 MFLOP, and it has 4. At 1 TFLOP/s, 1 GB/s and 10 us a
forward pass takes 2.15 + 4.19 + 0.01 = 6.35 ms.

In G groups (`model_parallel.py` has the equation and its minimum) the volume has two parts: activations, which the
next layer waits for, and weights, whose exchange can hide behind the backward pass. Groups are whole: both neighbours
of the ideal number count, and so do 1 (model parallelism) and N (data parallelism).
"""

from __future__ import annotations

from math import ceil, floor
from typing import NamedTuple

from unisono.plan.convolution_loops import FLOAT32_BYTES, ConvolutionLoops
from unisono.plan.model_parallel import LayerShape, hybrid_bytes, ideal_groups


class NodeLink(NamedTuple):
    """Speed of a node at a layer's products, and of its link."""

    flops: float
    """FLOPs per second."""
    bandwidth: float
    """Bytes per second."""
    latency: float = 0.0
    """Seconds before a transfer."""


class ForwardBytes(NamedTuple):
    """Bytes of a forward pass on one node."""

    sent: float
    received: float


class HybridVolume(NamedTuple):
    """Bytes of a step on one node."""

    activations: float
    weights: float


def forward_bytes(shape: LayerShape, minibatch: int, nodes: int, size: int = FLOAT32_BYTES) -> ForwardBytes:
    """Return the bytes that a node with a 1 / `nodes` of the input features sends and receives."""
    own = size * shape.ifm / nodes * shape.area * minibatch
    return ForwardBytes(own, own * (nodes - 1))


def block_flops(loops: ConvolutionLoops, minibatch: int, nodes: int) -> float:
    """Return the FLOPs of one pass over a 1 / `nodes` of the inputs' features and of the outputs'."""
    return loops.flops(minibatch) / nodes**2


def forward_seconds(loops: ConvolutionLoops, minibatch: int, nodes: int, node: NodeLink) -> float:
    """Return the seconds of a forward pass in one group of all nodes, float32."""
    shape = shape_of(loops)
    return (
        nodes * block_flops(loops, minibatch, nodes) / node.flops
        + sum(forward_bytes(shape, minibatch, nodes)) / node.bandwidth
        + node.latency
    )


def shape_of(loops: ConvolutionLoops) -> LayerShape:
    """Return the sizes that volumes depend on."""
    (down, right), (rows, columns) = loops.inputs, loops.kernel
    return LayerShape(loops.in_channels, loops.out_channels, rows * columns, down * right)


def hybrid_volume(
    shape: LayerShape, minibatch: float, nodes: int, groups: int, overlap: float = 0.0, size: int = FLOAT32_BYTES
) -> HybridVolume:
    """Return the parts of `hybrid_bytes`: activations of a group's samples, and its share of the weights."""
    activations = 2 * size * shape.ifm * shape.area * minibatch / groups if groups < nodes else 0.0
    weights = size * shape.ofm * shape.ifm * shape.kernel * (2 - overlap) * groups / nodes if groups > 1 else 0.0
    return HybridVolume(activations, weights)


def whole_groups(shape: LayerShape, minibatch: float, nodes: int, overlap: float = 0.0) -> int:
    """Return the number of groups that sends least, whether or not it divides the nodes; of equals, the fewest.

    Between the ends the volume is convex, so no whole number is better than a neighbour of the ideal.
    """
    ideal = min(max(ideal_groups(shape, minibatch, nodes, overlap), 1), nodes)
    near = sorted({1, floor(ideal), ceil(ideal), min(2, nodes), max(1, nodes - 1), nodes})
    return min(near, key=lambda groups: hybrid_bytes(shape, minibatch, nodes, groups, overlap))
