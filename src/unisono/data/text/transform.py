"""Transform of windows of tokens to inputs and labels.

window    a b c d     (n + 1,), uint16 or uint32
memory    a b c       inputs      (2, n), int64
          b c d       labels
"""

from __future__ import annotations

import numpy as np
import torch

from unisono.data.counter_rng import CounterRNG
from unisono.data.text.windows import token_dtype
from unisono.errors import DecodeError


class TextTransform:
    """Transform of windows with `tokens` labels of a vocabulary, for one thread."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self.shape = (2, tokens)
        self._dtype = token_dtype(vocabulary)

    def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:  # noqa: ARG002  as it is
        """Convert one window into `out`, (2, tokens). Raises DecodeError if it has another number of bytes."""
        expected = (self.shape[1] + 1) * self._dtype.itemsize
        if len(file) != expected:
            raise DecodeError(f"a window of {self.shape[1] + 1} tokens has {expected} bytes, this one {len(file)}")
        found = torch.from_numpy(np.frombuffer(file, self._dtype).astype(np.int64))
        out[0].copy_(found[:-1])
        out[1].copy_(found[1:])

    @staticmethod
    def batch(memory: torch.Tensor) -> torch.Tensor:
        """Return the inputs of a batch, (samples, tokens)."""
        return memory[:, 0]
