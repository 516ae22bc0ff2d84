"""Speedup of a network on many nodes: strong scaling by layers (PCL-DNN 3), weak scaling by shares (swCaffe 6.3).

Strong scaling keeps the minibatch of all nodes. Convolutions are data parallel, fully connected layers are in groups:

    step      = computing + bubble + activations
    computing = minibatch / N times the seconds of a sample on one node, all layers
    bubble    = the largest of `overlap.py`: weights of convolutions, and the weights' part of the groups
    activations = 2 transfers of each layer in groups, forward and backward, which are waited for (`hybrid.py`)
    speedup   = minibatch times the seconds of a sample, divided by the step

Worked example: a convolution of 3 ms a sample and 1 MB of weights, and a layer 1,000 ─▶ 1,000 of 1 ms, minibatch 8, on
4 nodes of 1 GB/s. Model parallelism (one group) sends 2 * 4 * 1,000 * 8 = 64 KB and no weights: 0.064 ms. Computing is
2 * 4 = 8 ms, the convolution's exchange takes 1 ms and its own third, 2 ms, hides it: 32 / 8.064 = 3.97.

Weak scaling keeps the samples of a node, so computing stays, and the exchange after it is added:

    step = computing + exchange       speedup = N computing / step = N (1 - share of the exchange)

Worked example: 1,024 nodes, 30.13% of the step in communication: 1,024 * 0.6987 = 715 (swCaffe's figures 10 and 11).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from unisono.plan.data_parallelism import exchanged_bytes
from unisono.plan.hybrid import hybrid_volume
from unisono.plan.model_parallel import LayerShape, best_groups
from unisono.plan.overlap import Layer, Machine, bubbles

TRANSFERS_OF_GROUPS = 2
"""Transfers of activations of a layer in groups: one forward, one backward."""


class ScaledLayer(NamedTuple):
    """Cost of a layer on one node."""

    seconds: float
    """Seconds of its three passes for one sample."""
    weights: int
    """Number of its weights."""
    shape: LayerShape | None = None
    """Sizes, where the layer can be split over a group of nodes; None: data parallel."""


class LinkSpeed(NamedTuple):
    """Speed of a node's link."""

    bandwidth: float
    """Bytes per second."""
    latency: float = 0.0
    """Seconds before a transfer."""


class ScaledStep(NamedTuple):
    """Seconds of a step on many nodes, by part."""

    computing: float
    bubble: float
    activations: float
    speedup: float
    """Times as fast as one node."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.computing + self.bubble + self.activations


def strong_scaling(
    layers: Sequence[ScaledLayer], link: LinkSpeed, minibatch: int, nodes: int, overlap: float = 1
) -> ScaledStep:
    """Return the step of `minibatch` samples on all nodes together; layers in the order of the forward pass, float32.

    Each layer with a shape takes the number of groups that sends least (`best_groups`).
    """
    alone = minibatch * sum(layer.seconds for layer in layers)
    if nodes == 1:
        return ScaledStep(alone, 0.0, 0.0, 1.0)
    costs, waited = list[Layer](), 0.0
    for layer in layers:
        sent = exchanged_bytes(layer.weights, overlap)
        if layer.shape is not None:
            groups = best_groups(layer.shape, minibatch, nodes, overlap)
            volume = hybrid_volume(layer.shape, minibatch, nodes, groups, overlap)
            sent = volume.weights
            if volume.activations:
                waited += volume.activations / link.bandwidth + TRANSFERS_OF_GROUPS * link.latency
        costs.append(Layer(layer.seconds * minibatch / nodes, sent))
    bubble = max(0.0, *bubbles(costs, Machine(1, link.bandwidth)))
    return ScaledStep(alone / nodes, bubble, waited, alone / (alone / nodes + bubble + waited))


def weak_speedup(nodes: int, computing: float, exchange: float) -> float:
    """Return the speedup of N nodes whose step has an exchange, in seconds, after its computing.

    >>> weak_speedup(4, computing=3.0, exchange=1.0)
    3.0
    """
    return nodes * computing / (computing + exchange)


def epoch_seconds(samples: int, minibatch: int, step_seconds: float) -> float:
    """Return the seconds of an epoch: a last smaller minibatch takes a step as well.

    >>> epoch_seconds(1000, 256, 0.5)
    2.0
    """
    return ceil(samples / minibatch) * step_seconds


def last_worthwhile(speedups: Sequence[tuple[int, float]], least: float = 0.5) -> int:
    """Return the last number of nodes, of (nodes, speedup) in rising order, up to which each further node has added at
    least `least` to the speedup: marginal efficiency, the difference of speedups over that of nodes.

    >>> last_worthwhile([(1, 1.0), (2, 1.9), (4, 3.2), (8, 3.6)])
    4
    """
    last = speedups[0][0]
    for (fewer, before), (nodes, speedup) in pairwise(speedups):
        if speedup - before < least * (nodes - fewer):
            break
        last = nodes
    return last
