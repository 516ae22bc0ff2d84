"""Interface that operations act on: one rank's model, its gradients and the buckets they are sent in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unisono.step.layout import Layout

if TYPE_CHECKING:
    import torch


ANCHOR, MOMENTUM, SENT, RESIDUAL, SUM_RESIDUAL = "anchor", "momentum", "sent", "residual", "sum_residual"
"""Names of the tensors that a rule keeps."""


class RuleMemory:
    """Tensors that a rule keeps between steps on one rank, by name and key of a bucket.

        anchor      weights after the last outer step, the same on all ranks
        momentum    of the outer optimizer, the same on all ranks
        sent        weights when the change was packed; only while its exchange is in flight
        residual    this rank's part of the changes that quantization has left out so far
        sum_residual    the same for the sum of this rank's shard: `bounds(length, ranks, rank)` of the bucket

    Each is flat, with the elements and the dtype of its bucket. Tasks of one bucket use them one after another.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def __contains__(self, entry: tuple[str, int]) -> bool:
        return entry in self._kept

    def get(self, name: str, key: int) -> torch.Tensor:
        """Return a tensor, to be changed in place. Raises KeyError where it is not kept."""
        return self._kept[name, key]

    def get_or_zeros(self, name: str, key: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor, to be changed in place; where it is not kept, zeros like `like`, kept from now on."""
        found = self._kept.get((name, key))
        if found is None:
            found = self._kept[name, key] = like.new_zeros(like.shape)
        return found

    def put(self, name: str, key: int, tensor: torch.Tensor) -> None:
        """Keep a tensor, in place of an earlier one."""
        self._kept[name, key] = tensor

    def pop(self, name: str, key: int) -> torch.Tensor:
        """Return a tensor and keep it no longer. Raises KeyError where it is not kept."""
        return self._kept.pop((name, key))

    def items(self) -> list[tuple[tuple[str, int], torch.Tensor]]:
        """Return all entries: ((name, key), tensor)."""
        return list(self._kept.items())

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()


class Replica(Protocol):
    """Copy of a model on one rank, in training."""

    layout: Layout
    kept: RuleMemory
    """Tensors that the rule keeps between steps; the anchor is there from before the first update."""

    def agree(self, world: Any) -> None:
        """Sum the control messages, which gives the weight of this rank's gradients."""

    def pack(self, key: int, scaled: bool = True) -> None:
        """Write gradients, times this rank's weight if `scaled`, into a bucket. This rank's own are gone from here on.

        Unscaled gradients of a rank that does not contribute count as zero."""

    def bucket(self, key: int) -> torch.Tensor:
        """Return the elements of a bucket that are sent: flat, contiguous, of one dtype."""

    def sums(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds gradients, without the flags behind it."""

    def flags(self, key: int) -> torch.Tensor:
        """Return the part of a bucket that holds the flags of its parameters: nonzero where any rank has a gradient."""

    def set_grads(self, key: int) -> None:
        """Make a bucket's sums the gradients of its parameters."""

    def sum_squares(self, world: Any) -> None:
        """Sum the squares of all averaged gradients over the ranks, each part of a split one once: for `clip`."""

    def clip(self) -> None:
        """Scale all averaged gradients so that their common norm is at most the layout's `clip`."""

    def clip_local(self) -> None:
        """Scale all of this rank's own gradients so that their common norm is at most the layout's `clip`."""

    def update(self, parameters: Sequence[int]) -> None:
        """Apply the optimizer's step to these parameters, with averaged gradients."""

    def update_local(self, parameters: Sequence[int]) -> None:
        """Apply the optimizer's step to these parameters, with this rank's own gradients, which are gone then."""

    def pack_weights(self, key: int) -> None:
        """Write weights, divided by the number of ranks, into a bucket."""

    def unpack_weights(self, key: int) -> None:
        """Copy the contents of a bucket to the weights of its parameters."""

    def read_weights(self, key: int) -> torch.Tensor:
        """Return a copy of the weights of a bucket, flat, with as many elements as the bucket."""

    def write_weights(self, key: int, flat: torch.Tensor) -> None:
        """Copy a tensor like that of `read_weights` to the weights of a bucket."""

    def fill_bucket(self, key: int, flat: torch.Tensor) -> None:
        """Copy a tensor like that of `read_weights` into a bucket."""

    def pack_buffers(self) -> None:
        """Copy the model's present buffers to the memory they are sent from."""

    def buffers(self) -> torch.Tensor:
        """Return the memory that the model's buffers are sent in. The model takes rank 0's before its next read."""
