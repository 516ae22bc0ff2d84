"""Computation of a network on a processor: number format, cores, and convolution algorithms."""

AUTO = "auto"
PRECISIONS = (AUTO, "float32", "bfloat16")
"""Precisions that a recipe can name: `auto`, the best format for the processor, or one of these."""
