"""Memory of a rule on one rank: tensors that it keeps between steps, by name and bucket.

    anchor      weights after the last outer step, the same on all ranks
    momentum    of the outer optimizer, the same on all ranks
    sent        weights when the change was packed; only while its exchange is in flight
    residual    this rank's part of the changes that quantization has left out so far
    sum_residual    the same for the sum of this rank's shard: `bounds(length, ranks, rank)` of the bucket

Each is flat, with the elements and the dtype of its bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ANCHOR, MOMENTUM, SENT, RESIDUAL, SUM_RESIDUAL = "anchor", "momentum", "sent", "residual", "sum_residual"


class RuleMemory:
    """Tensors by name and key of a bucket. Tasks of one bucket use them one after another."""

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
