"""Computation of a network: number format of its products, and algorithms of its convolutions."""

from unisono.processor import AUTO

PRECISIONS = (AUTO, "float32", "bfloat16")
"""Precisions that a recipe can name: `auto`, the best format for the processor, or one of these."""
