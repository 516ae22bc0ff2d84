"""Embeddings that are split over a model group, by rows (Megatron-LM section 3: the vocabulary).

    10 rows, 4 ranks: 0-2, 3-5, 6-8, 9          numbers    4        9        4
                                                rank 1     row 4    0        row 4   ┐
                                                rank 3     0        row 9    0       ┴ sum over the group: whole

Each rank looks up the numbers that it holds; the others give zeros. For B numbers and vectors of d elements the sum is
an allreduce of B d elements in the forward pass: each of p ranks sends 2 (p - 1) / p of them, 3/2 for 4 ranks. The
backward pass sends nothing: each rank takes the gradients of its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from unisono.tensor_parallel.activations import scatter_sum, sum_over_group
from unisono.tensor_parallel.divide import uneven
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.tensor_parallel.plan import PART, ROW, Split


class RowParallelEmbedding(ParallelLayer, nn.Embedding):
    """Embedding of which each rank has some rows: weight (rows / p, rounded up, d)."""

    by = ROW

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
            return "takes numbers, which are whole: leave away 'takes part'"
        if split.ranks > layer.num_embeddings:
            return f"has {layer.num_embeddings} rows for {split.ranks} ranks: use a smaller group"
        return uneven(layer.embedding_dim, "features", split.ranks) if split.gives == PART else None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return vectors, (..., d) or this rank's part of them, for int numbers (...)."""
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.num_embeddings:
            raise IndexError(f"numbers {int(input.min())} to {int(input.max())} in {self.num_embeddings} rows")
        part = self.parts["weight"]
        local = input - part.start
        elsewhere = (local < 0) | (local >= part.size)
        padding = None if self.padding_idx is None else self.padding_idx - part.start
        own = padding if padding is not None and 0 <= padding < part.size else None
        partial = functional.embedding(local.masked_fill(elsewhere, 0), self.weight, own)
        partial = partial.masked_fill(elsewhere.unsqueeze(-1), 0)
        return scatter_sum(partial, self.group) if self.split.gives == PART else sum_over_group(partial, self.group)
