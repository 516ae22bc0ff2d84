"""Interface that operations act on: one rank's model, its gradients and the buckets they are sent in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unisono.step.layout import Layout

if TYPE_CHECKING:
    import torch


class Replica(Protocol):
    """Copy of a model on one rank, in training."""

    layout: Layout

    def agree(self, world: Any) -> None:
        """Sum the control words, which gives the weight of this rank's gradients."""

    def pack(self, key: int) -> None:
        """Write gradients, times this rank's weight, into a bucket. This rank's own are gone from here on."""

    def bucket(self, key: int) -> torch.Tensor:
        """Return the elements of a bucket that are sent: flat, contiguous, of one dtype."""

    def sums(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds gradients, without the flags behind it."""

    def flags(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds the flags of its parameters: nonzero where any rank has a gradient."""

    def settle(self, key: int) -> None:
        """Make a bucket's sums the gradients of its parameters."""

    def clip(self) -> None:
        """Scale all averaged gradients so that their common norm is at most the layout's `clip`."""

    def clip_alone(self) -> None:
        """Scale all of this rank's own gradients so that their common norm is at most the layout's `clip`."""

    def update(self, parameters: Sequence[int]) -> None:
        """Apply the optimizer's step to these parameters, with averaged gradients."""

    def update_alone(self, parameters: Sequence[int]) -> None:
        """Apply the optimizer's step to these parameters, with this rank's own gradients, which are gone then."""

    def pack_weights(self, key: int) -> None:
        """Write weights, divided by the number of ranks, into a bucket."""

    def unpack_weights(self, key: int) -> None:
        """Copy the contents of a bucket to the weights of its parameters."""

    def pack_buffers(self) -> None:
        """Copy the model's present buffers to the memory they are sent from."""

    def buffers(self) -> torch.Tensor:
        """Return the memory that the model's buffers are sent in. The model takes rank 0's before its next read."""
