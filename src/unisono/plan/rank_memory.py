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

from collections.abc import Mapping
from typing import NamedTuple

import torch

from unisono.optimizers.build import make_optimizer
from unisono.plan.loading import held_bytes
from unisono.plan.planned_run import PlannedRun
from unisono.plan.split import COLUMN, TAKES, SplitInputs, size_of
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


def rank_memory(run: PlannedRun) -> RankMemory:
    """Return the memory of a rank of a run whose layers are whole."""
    state, weights = run.rule.traits.state, float(sum(layer.parameter_bytes for layer in run.layers))
    activations = sum(layer.activation_bytes for layer in run.layers) * run.samples_of_rank / run.traced
    optimizer = weights * run.kept / (run.ranks if state is RankState.SHARDED else 1)
    held = held_bytes(run.samples, run.epoch_samples, run.nodes, run.ranks)
    return RankMemory(weights, weights, optimizer, weights if state.has_anchor else 0.0, activations, held)


def memory_with(splits: Mapping[str, str], whole: RankMemory, inputs: SplitInputs) -> RankMemory:
    """Return the memory of a rank with these splits, from that without: of weights its parts, and all that is whole.

    A split layer keeps the inputs of its group, or its part of them, for the backward pass.
    """
    by_name = {layer.name: layer for layer in inputs.layers}
    weights, kept = float(sum(inputs.weights)), 0.0
    for name, words in splits.items():
        layer, size = by_name[name], size_of(words)
        weights -= inputs.weights[inputs.numbers[name]] * (1 - 1 / size)
        whole_input = words.startswith(COLUMN) or layer.gathers
        kept += layer.inputs * inputs.samples * (size if whole_input else TAKES not in words)
    own = {key: getattr(whole, key) * weights / sum(inputs.weights) for key in ("weights", "gradients", "optimizer")}
    return whole._replace(activations=whole.activations + kept, **own)


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
