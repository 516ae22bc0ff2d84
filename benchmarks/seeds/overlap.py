"""Model of the exchange that computing can hide, layer by layer: PCL-DNN section 3.1.

Layers count from 0, the first of the forward pass. The backward pass starts with the last layer. In each layer it
computes the gradient of the weights first, so the layer's own last third still hides something:

    backward      │ layer 3 │ layer 2 │ layer 1 │ layer 0 │ forward ...
    exchange                │ 3 │        2        │ 1 │     0     │
    hidden by               └─ ocomp_3 = comp_0 + comp_1 + comp_2 + comp_3 / 3

    ocomp_i  = sum of comp_j over j < i, + comp_i / 3           what can still be computed once gradient i is there
    ocomms_i = sum of comms_j over j <= i                       what has still to be exchanged then
    bubble_i = ocomms_i / comms_sys - ocomp_i / comp_sys        seconds that layer i's weights come too late, if > 0

For 4 layers of comp 3, 3, 3, 3 at 1 a second and comms 1, 1, 1, 4 at 1 a second: ocomp 1, 4, 7, 10, ocomms 1, 2, 3, 7,
bubbles 0, -2, -4, -3: everything hides, layer 0 by its own third alone.

With comms 4, 1, 1, 1 the bubbles are 3, 1, -1, -3. The section adds up what is positive, 12 / (12 + 3 + 1) = 0.75. But
ocomms_i has all exchanges before it, so layer 1's second of delay is one of layer 0's three: the step takes as long as
its latest weights, 12 / (12 + 3) = 0.8. The sum is the more careful figure, the worst bubble the one that is played.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Layer(NamedTuple):
    """Cost of a layer on one node."""

    computing: float
    """FLOPs of forward, backward and gradient of the weights."""
    communication: float
    """Bytes that are exchanged."""


class Machine(NamedTuple):
    """Speed of a node."""

    computing: float
    """FLOPs per second."""
    communication: float
    """Bytes per second."""


def bubbles(layers: Sequence[Layer], machine: Machine) -> list[float]:
    """Return the seconds by which each layer's exchange outlasts the computing that can hide it; below 0: time left."""
    before = [0.0, *accumulate(layer.computing for layer in layers)]
    sent = accumulate(layer.communication for layer in layers)
    return [
        to_send / machine.communication - (done + layer.computing / 3) / machine.computing
        for layer, done, to_send in zip(layers, before, sent, strict=False)
    ]


def worst_bubble_efficiency(layers: Sequence[Layer], machine: Machine) -> float:
    """Return the computing time divided by the step time, which is computing plus the worst bubble."""
    computing = sum(layer.computing for layer in layers) / machine.computing
    return computing / (computing + max(0.0, *bubbles(layers, machine)))


def summed_bubbles_efficiency(layers: Sequence[Layer], machine: Machine) -> float:
    """Return the computing time divided by computing plus all bubbles, as the section does."""
    computing = sum(layer.computing for layer in layers) / machine.computing
    return computing / (computing + sum(max(0.0, bubble) for bubble in bubbles(layers, machine)))


def max_nodes(layers: Sequence[Layer], machine: Machine, batch: int) -> float:
    """Return the number of nodes up to which the last layer has no bubble. `layers` cost one sample; `batch` is global.

    The computing of a node shrinks with its share of the batch; its communication does not.
    """
    ocomp = sum(layer.computing for layer in layers[:-1]) + layers[-1].computing / 3
    ocomms = sum(layer.communication for layer in layers)
    return batch * (machine.communication / machine.computing) * (ocomp / ocomms)


def least_samples(layers: Sequence[Layer], machine: Machine) -> float:
    """Return the samples of a node from which on the last layer has no bubble; `layers` cost one sample.

    PCL-DNN's table 1 rounds it up: 336 FLOPs per byte and layers of 208 FLOPs per byte need 336 / 208 = 1.6, so 2.
    """
    return 1 / max_nodes(layers, machine, batch=1)
