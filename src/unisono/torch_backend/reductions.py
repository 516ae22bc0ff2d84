"""PyTorch's reductions in terms of Unisono's: the steps before the exchange, in it, and after it.

SUM          sum
AVG          sum, then divided by the number of ranks
PREMUL_SUM   multiplied by a factor of each rank's, then sum
MIN MAX PRODUCT BAND BOR BXOR
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from unisono.errors import TensorError
from unisono.torch_backend.pytorch import ReduceOp

Kind = ReduceOp.RedOpType

NAMES = {
    Kind.SUM: "sum",
    Kind.AVG: "sum",
    Kind.PREMUL_SUM: "sum",
    Kind.PRODUCT: "product",
    Kind.MIN: "minimum",
    Kind.MAX: "maximum",
    Kind.BAND: "and",
    Kind.BOR: "or",
    Kind.BXOR: "xor",
}


class Reduction(NamedTuple):
    """Reduction of PyTorch, as steps before, in and after the exchange."""

    op: str
    """Name of the op in the collectives."""
    factor: Any = None
    """Factor by which each rank first multiplies its tensor, a number or a tensor; None for none."""
    average: bool = False
    """True if the sum is divided by the number of ranks."""

    def before(self, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
        """Return the input of the exchange: `tensor` itself, or with `copy` never the same memory if it is changed."""
        if self.factor is None:
            return tensor
        return tensor * self.factor if copy else tensor.mul_(self.factor)

    def after(self, tensor: torch.Tensor, ranks: int) -> None:
        """Apply the step after the exchange in place: divide an average by the number of ranks, truncating integers."""
        if not self.average:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(ranks)
        else:
            tensor.div_(ranks, rounding_mode="trunc")


PLAIN = {kind: Reduction(name, average=kind == Kind.AVG) for kind, name in NAMES.items()}


def reduction_of(op: Any) -> Reduction:
    """Return the reduction for PyTorch's `op`. Raises TensorError for an unknown one."""
    kind = getattr(op, "op", op)
    if kind == Kind.PREMUL_SUM:
        return Reduction("sum", op.factor)
    if kind not in PLAIN:
        raise TensorError(f"cannot reduce by {kind}; there are {', '.join(known.name for known in NAMES)}")
    return PLAIN[kind]
