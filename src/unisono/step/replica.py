"""Interface that operations act on: one rank's model, its gradients and the buckets they are sent in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from unisono.step.layout import Layout

if TYPE_CHECKING:
    import torch


ANCHOR, MOMENTUM, SENT, RESIDUAL, SUM_RESIDUAL = "anchor", "momentum", "sent", "residual", "sum_residual"
"""Names of the tensors that a rule keeps."""


class RuleMemory(dict[tuple[str, int], "torch.Tensor"]):
    """Tensors that a rule keeps between steps on one rank, by name and key of a bucket.

        anchor      weights after the last outer step, the same on all ranks
        momentum    of the outer optimizer, the same on all ranks
        sent        weights when the change was packed; only while its exchange is in flight
        residual    this rank's part of the changes that quantization has left out so far
        sum_residual    the same for the sum of this rank's shard: `bounds(length, ranks, rank)` of the bucket

    Each is flat, with the elements and the dtype of its bucket. Tasks of one bucket use them one after another.
    """

    def or_zeros(self, name: str, key: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor, to be changed in place; where it is not kept, zeros like `like`, kept from now on."""
        if (name, key) not in self:
            self[name, key] = like.new_zeros(like.shape)
        return self[name, key]


class Replica(Protocol):
    """Copy of a model on one rank, in training.

    It has further methods, each for one operation, which describes it: `agree`, `pack`, `set_grads`, `clip`, `update`
    and so on (`operations.py`).
    """

    layout: Layout
    kept: RuleMemory
    """Tensors that the rule keeps between steps; the anchor is there from before the first update."""

    def bucket(self, key: int) -> torch.Tensor:
        """Return the elements of a bucket that are sent: flat, contiguous, of one dtype."""

    def arrivals(self, key: int) -> Iterable[torch.Tensor]:
        """Yield the elements of a bucket that are sent, in parts, each as soon as it may be sent."""

    def sums(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds gradients, without the flags behind it."""

    def flags(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds the flags of its parameters: nonzero where any rank has a gradient."""

    def read_weights(self, key: int) -> torch.Tensor:
        """Return a copy of the weights of a bucket, flat, with as many elements as the bucket."""

    def write_weights(self, key: int, flat: torch.Tensor) -> None:
        """Copy a tensor like that of `read_weights` to the weights of a bucket."""

    def fill_bucket(self, key: int, flat: torch.Tensor) -> None:
        """Copy a tensor like that of `read_weights` into a bucket."""
