"""AdamW (Loshchilov and Hutter 2019), from PyTorch: Adam with weight decay that is not part of the gradient."""

from __future__ import annotations

from typing import Any

import torch


def make(groups: list[dict[str, Any]], rate: float, _: float) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe; its groups have the betas."""
    return torch.optim.AdamW(groups, rate)
