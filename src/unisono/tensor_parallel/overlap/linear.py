"""Products of a linear layer on rows of features.

    4 ranks, 1,024 rows, 4,096 ─▶ 4,096 features, float32, a row layer that takes a part, 4 slices:

    products   │ x0 W │ x1 W  │ x2 W  │ x3 W  │            x_i (256, 1,024), weight (4,096, 1,024)
    exchanges         │ sum 0 │ sum 1 │ sum 2 │ sum 3 │    each of 4.2 MB: a rank sends 3/2 of it; 25.2 MB in all

The product of a slice has the rows that the whole product would have. The weight's gradient is one product of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LinearProducts:
    """Products of a linear layer: weight (out, in), bias (out), rows (in)."""

    row_dims = 1

    def outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, (rows, out), of `x`, (rows, in)."""
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())

    def grad_input(self, gradient: Tensor, weight: Tensor, _: torch.Size) -> Tensor:
        """Return the gradient of the rows, (rows, in), from that of their outputs, (rows, out)."""
        return torch.mm(gradient, weight)

    def grad_weight(self, gradient: Tensor, x: Tensor, _: torch.Size) -> Tensor:
        """Return the gradient of the weight, (out, in)."""
        return torch.mm(gradient.t(), x)
