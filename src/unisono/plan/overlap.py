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


def efficiency(layers: Sequence[Layer], machine: Machine) -> float:
    """Return the computing time divided by the step time, which is computing plus the worst bubble."""
    computing = sum(layer.computing for layer in layers) / machine.computing
    return computing / (computing + max(0.0, *bubbles(layers, machine)))


def max_nodes(layers: Sequence[Layer], machine: Machine, batch: int) -> float:
    """Return the number of nodes up to which the last layer has no bubble. `layers` cost one sample; `batch` is global.

    The computing of a node shrinks with its share of the batch; its communication does not.
    """
    ocomp = sum(layer.computing for layer in layers[:-1]) + layers[-1].computing / 3
    ocomms = sum(layer.communication for layer in layers)
    return batch * (machine.communication / machine.computing) * (ocomp / ocomms)
