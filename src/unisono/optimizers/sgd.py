"""Stochastic gradient descent with momentum, from PyTorch."""

from __future__ import annotations

from typing import Any

import torch


def make(groups: list[dict[str, Any]], rate: float, momentum: float) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe."""
    return torch.optim.SGD(groups, rate, momentum=momentum)
