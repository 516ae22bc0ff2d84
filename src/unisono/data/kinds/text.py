"""Text: windows of n + 1 tokens. Inputs are the first n, labels the last n, so each token predicts the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from unisono.data.kinds.kind import SampleKind, SampleTransform, TransformOptions
from unisono.data.text.tokenizers import ByteTokenizer

if TYPE_CHECKING:
    import torch

    from unisono.data.pack.index import Index
    from unisono.data.pack.options import PackOptions


class TextKind(SampleKind):
    """Windows of tokens. The pack's shape is (n + 1,), its classes are the vocabulary."""

    plural = "windows of text"
    column = "tokens"
    class_words = "tokens"
    labels_are_tokens = True
    class_remedy = "pack texts with the same --tokenizer"
    integers = True

    def encode(self, sample: bytes, options: PackOptions) -> bytes:  # noqa: ARG002  tokens stay as they are
        """Return the window unchanged."""
        return sample

    def transform(self, index: Index, options: TransformOptions) -> Callable[[], SampleTransform]:  # noqa: ARG002
        """Return the function that makes the transform: inputs, and labels one token on."""
        from unisono.data.text.transform import TextTransform  # noqa: PLC0415  recipes are checked without PyTorch

        return partial(TextTransform, self.labels_per_sample(index.about.shape), len(index.about.classes))

    def labels_per_sample(self, shape: tuple[int, ...] | None) -> int:
        """Return n for windows of n + 1 tokens."""
        assert shape is not None, "windows have a shape"
        return shape[0] - 1

    def bytes_per_label(self, classes: tuple[str, ...]) -> int | None:
        """Return 1 if tokens are bytes."""
        return 1 if classes == ByteTokenizer.tokens else None

    def labels(self, memory: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  a window has its own
        """Return the tokens that follow the inputs, (samples, n)."""
        return memory[:, 1]
