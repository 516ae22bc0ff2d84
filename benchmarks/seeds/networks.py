"""Layers of the papers' networks, traced for one sample without memory."""

from __future__ import annotations

from functools import cache

import torch

from unisono.models import MODELS
from unisono.plan.trace import TracedLayer, trace

INPUTS = {"overfeat_fast": (3, 231, 231), "cd_dnn": (440,)}
"""Shapes of a sample; of all others, 3 channels of 224 x 224."""

SENONES = 9304
"""Outputs of CD-DNN in Seide et al. 2011."""

TRACED_SAMPLES = 2
"""Samples of a trace: batch norm needs more than one."""


@cache
def layers_of(name: str) -> tuple[TracedLayer, ...]:
    """Return the layers of a network for TRACED_SAMPLES samples."""
    shape = shape_of(name)
    with torch.device("meta"):
        model = MODELS.load(name)(classes_of(name), shape[0])
    return tuple(trace(model, torch.empty(TRACED_SAMPLES, *shape)).layers)


def shape_of(name: str) -> tuple[int, ...]:
    """Return the shape of a sample."""
    return INPUTS.get(name, (3, 224, 224))


def classes_of(name: str) -> int:
    """Return the number of a network's outputs."""
    return SENONES if name == "cd_dnn" else 1000


def flops_of(layer: TracedLayer, training: bool = True) -> float:
    """Return the FLOPs of a layer for one sample."""
    return (layer.flops if training else layer.forward_flops) / TRACED_SAMPLES


def moved_bytes(name: str, training: bool = True) -> float:
    """Return the bytes of a sample that layers without products move: pools, relus and the like.

    The forward pass reads inputs and writes outputs; the backward pass reads the outputs and their gradients, and
    writes the gradients of the inputs.
    """
    return (
        sum(
            (1 + training) * layer.input_bytes + (1 + 2 * training) * layer.activation_bytes
            for layer in layers_of(name)
            if not layer.flops
        )
        / TRACED_SAMPLES
    )


def convolutions_of(name: str) -> list[TracedLayer]:
    """Return the convolutions of a network."""
    return [layer for layer in layers_of(name) if layer.kind.startswith("Conv")]


def parameters_of(name: str) -> int:
    """Return the number of parameters of a network."""
    return sum(layer.parameters for layer in layers_of(name))
