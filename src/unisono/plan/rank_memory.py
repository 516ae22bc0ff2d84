"""Memory of a rank in training, from the layers of a traced model.

    weights        all of them, on each rank
    gradients      as many bytes: buckets are made of them
    optimizer      numbers that it keeps for each weight: 0 or 1 for SGD, 2 for AdamW; a sharded rule, a p-th
    anchor         the weights of the last exchange, where a rule keeps them
    activations    outputs of all layers for the rank's samples, kept for the backward pass
    samples        encoded samples that it holds for all of training (`loading.py`)

    bytes = weights (2 + kept / (1 or p) + anchor) + samples * outputs of a sample + encoded samples

Worked example: 4 ranks, 100 MB of weights, AdamW, 8 samples of 50 MB: 100 + 100 + 200 + 400 = 800 MB. Sharded, the
optimizer has 50 MB: 650 MB.

Known limits: outputs that a layer changes in place count, views do not; working memory of convolutions, fragments in
flight and errors of quantization are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from unisono.optimizers.build import make_optimizer
from unisono.plan.trace import TracedLayer
from unisono.rules import BaseRule
from unisono.step.rule import RankState


class RankMemory(NamedTuple):
    """Bytes of a rank, by use."""

    weights: float
    gradients: float
    optimizer: float
    anchor: float
    activations: float
    samples: float = 0.0
    """Encoded samples, where they are in memory."""

    @property
    def total(self) -> float:
        """Bytes of all uses."""
        return sum(self)


def rank_memory(
    layers: Sequence[TracedLayer], traced: int, samples: int, ranks: int, rule: BaseRule, kept: float, held: float = 0.0
) -> RankMemory:
    """Return the memory of a rank with `samples` samples, of layers traced for `traced`; `kept` is the number of
    numbers that the optimizer keeps for each weight, `held` the bytes of its encoded samples."""
    weights = float(sum(layer.parameter_bytes for layer in layers))
    activations = sum(layer.activation_bytes for layer in layers) * samples / traced
    state = weights * kept / (ranks if rule.traits.state is RankState.SHARDED else 1)
    return RankMemory(weights, weights, state, weights if rule.traits.state.has_anchor else 0.0, activations, held)


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
    kept = [one for one in made.state[model.weight].values() if isinstance(one, torch.Tensor) and one.ndim]
    return sum(one.numel() for one in kept) / model.weight.numel()
