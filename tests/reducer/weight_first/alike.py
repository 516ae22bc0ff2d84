"""Comparison of a layer that computes its weight gradient first with PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from unisono.reducer.weight_first import Readings, decision, take


def taken(model: nn.Module) -> Readings:
    """Return the readings of a model whose layers compute the weight gradients first."""
    return take(model, list(model.parameters()), 2, lambda: None)


@contextmanager
def however_small() -> Iterator[None]:
    """Let the smallest products count as worth it within the block."""
    before = decision.SMALLEST_PRODUCT
    decision.SMALLEST_PRODUCT = 0
    try:
        yield
    finally:
        decision.SMALLEST_PRODUCT = before


def results(layer: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs and all gradients of a layer, whose outputs the next one changes in place."""
    leaf = inputs.clone().requires_grad_()
    outputs = layer(leaf * 1)
    found = outputs.detach().clone()
    scores = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view(outputs.shape)
    (outputs.relu_().double() * scores).sum().backward()
    return [found, leaf.grad, *(one.grad for one in layer.parameters() if one.requires_grad)]


def assert_alike(layer: nn.Module, inputs: torch.Tensor) -> None:
    """Assert that a layer has PyTorch's outputs and gradients, in every bit, with the weight gradient first."""
    own = copy.deepcopy(layer)
    taken(layer)
    with however_small():
        nodes = layer(inputs.clone().requires_grad_()).grad_fn.name()
        first = results(layer, inputs)
    assert "_GradWeight" in nodes
    for one, other in zip(first, results(own, inputs), strict=True):
        assert torch.equal(one, other)
