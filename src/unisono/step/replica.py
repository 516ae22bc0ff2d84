"""What operations act on: one rank's model, its gradients and the buckets they travel in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unisono.step.layout import Layout

if TYPE_CHECKING:
    import torch


class Replica(Protocol):
    """One rank's copy of a model while it is trained."""

    layout: Layout

    def agree(self, world: Any) -> None:
        """Sum the control words: from here on it is known what this rank's gradients weigh."""

    def pack(self, key: int) -> None:
        """Put gradients, times this rank's weight, into a bucket; this rank's own are gone from here on."""

    def bucket(self, key: int) -> torch.Tensor:
        """Return what travels in a bucket: flat, contiguous, of one dtype."""

    def sums(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds gradients, without the flags behind it."""

    def flags(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that says which parameters have a gradient: not 0 where any rank has one."""

    def settle(self, key: int) -> None:
        """Make what lies in a bucket the gradients of its parameters."""

    def clip(self) -> None:
        """Scale all averaged gradients so that their common norm is at most the layout's."""

    def clip_alone(self) -> None:
        """Scale all of this rank's own gradients so that their common norm is at most the layout's."""

    def update(self, parameters: Sequence[int]) -> None:
        """Have the optimizer make its step for some parameters, with averaged gradients."""

    def update_alone(self, parameters: Sequence[int]) -> None:
        """Have the optimizer make its step for some parameters, with this rank's own gradients, which are gone then."""

    def pack_weights(self, key: int) -> None:
        """Put weights, over the number of ranks, into a bucket."""

    def unpack_weights(self, key: int) -> None:
        """Make what lies in a bucket the weights of its parameters."""

    def pack_buffers(self) -> None:
        """Put the model's buffers, as they are now, where they travel."""

    def buffers(self) -> torch.Tensor:
        """Return what travels of the model's buffers: rank 0's, which the model takes before it reads them again."""
