"""Embeddings that are split over a model group, by rows (Megatron-LM section 3: the vocabulary).

    10 rows, 4 ranks: 0-2, 3-5, 6-8, 9          numbers    4        9        4
                                                rank 1     row 4    0        row 4   ┐
                                                rank 3     0        row 9    0       ┴ sum: to the rank of the sample

Each rank looks up the numbers of the group's samples that it holds; the others give zeros. The sum goes to the rank of
each sample. For b samples a rank and vectors of d elements each of 4 ranks sends 3/4 of 4 b d elements, forward and
backward, and 3/4 of the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from unisono.tensor_parallel.layer import ParallelLayer, uneven
from unisono.tensor_parallel.layouts import own_to_whole, partial_to_own, partial_to_part
from unisono.tensor_parallel.plan import PART, ROW, Split


class RowParallelEmbedding(ParallelLayer, nn.Embedding):
    """Embedding of which each rank has some rows: weight (rows / p, rounded up, d)."""

    by = ROW

    @property
    def least_dimensions(self) -> int:
        """Least dimensions of its input: samples."""
        return 1

    @classmethod
    def dims(cls, split: Split) -> Mapping[str, int]:  # noqa: ARG003  the same for all
        """Return the dimension along which each split parameter is cut."""
        return {"weight": 0}

    @classmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so."""
        if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
            return "has max_norm, sparse or scale_grad_by_freq, which need whole weights: leave it whole"
        if split.takes == PART:
            return "takes numbers, which have no features: leave away 'takes part'"
        if split.ranks > layer.num_embeddings:
            return f"has {layer.num_embeddings} rows for {split.ranks} ranks: use a smaller group"
        return uneven(layer.embedding_dim, "features", split.ranks) if split.gives == PART else None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return vectors, (b, ..., d) or this rank's part of the group's, for int numbers (b, ...)."""
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.num_embeddings:
            raise IndexError(f"numbers {int(input.min())} to {int(input.max())} in {self.num_embeddings} rows")
        part = self.parts["weight"]
        local = own_to_whole(input, self.link) - part.start
        elsewhere = (local < 0) | (local >= part.size)
        padding = None if self.padding_idx is None else self.padding_idx - part.start
        own = padding if padding is not None and 0 <= padding < part.size else None
        partial = functional.embedding(local.masked_fill(elsewhere, 0), self.weight, own)
        partial = partial.masked_fill(elsewhere.unsqueeze(-1), 0)
        return partial_to_part(partial, self.link) if self.split.gives == PART else partial_to_own(partial, self.link)
