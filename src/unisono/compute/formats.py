"""The number formats that a recipe can ask for, known without loading PyTorch."""

AUTO = "auto"
PRECISIONS = (AUTO, "float32", "bfloat16")
"""What the processor is made for, or one of these."""
