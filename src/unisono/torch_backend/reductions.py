"""PyTorch's reductions in terms of ours: what is done before the exchange, in it, and after.

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
    """A reduction."""

    op: str
    """By the name that the collectives know."""
    factor: Any = None
    """What each rank multiplies its tensor by first, a number or a tensor; None for nothing."""
    average: bool = False
    """Whether the sum is divided by the number of ranks."""

    def before(self, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
        """What goes into the exchange: `tensor` itself, or with `copy` never the same memory if it is changed."""
        if self.factor is None:
            return tensor
        return tensor * self.factor if copy else tensor.mul_(self.factor)

    def after(self, tensor: torch.Tensor, ranks: int) -> None:
        """What comes out of it, in place."""
        if not self.average:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(ranks)
        else:
            tensor.div_(ranks, rounding_mode="trunc")


PLAIN = {kind: Reduction(name, average=kind == Kind.AVG) for kind, name in NAMES.items()}


def reduction_of(op: Any) -> Reduction:
    """What PyTorch's `op` asks for. Raises TensorError for an unknown one."""
    kind = getattr(op, "op", op)
    if kind == Kind.PREMUL_SUM:
        return Reduction("sum", op.factor)
    if kind not in PLAIN:
        raise TensorError(f"cannot reduce by {kind}; there are {', '.join(known.name for known in NAMES)}")
    return PLAIN[kind]
