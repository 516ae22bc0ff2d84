"""Number formats that a recipe can name, known without loading PyTorch."""

AUTO = "auto"
PRECISIONS = (AUTO, "float32", "bfloat16")
"""Precisions: `auto`, the best format for the processor, or one of these."""
