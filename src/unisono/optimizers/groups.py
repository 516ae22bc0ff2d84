"""Selection of the parameters that weight decay applies to.

    weights of convolutions and linear layers, two dimensions or more     decay
    scales and shifts of norms, biases: one dimension or none             no decay (Goyal et al. 2017, section 5.1)

The size of a norm's scale and shift, or of a bias, does not make a function rough.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def by_decay(parameters: Iterable[torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's groups: parameters with weight decay `decay`, and those without. No group is empty."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    weights = {"params": [one for one in learning if one.ndim > 1], "weight_decay": decay}
    others = {"params": [one for one in learning if one.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (weights, others) if group["params"]]
