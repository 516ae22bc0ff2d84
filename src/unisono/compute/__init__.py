"""Computation of a network: device, number format, cores, and convolution algorithms."""

import re

AUTO, PROCESSOR = "auto", "cpu"
PRECISIONS = (AUTO, "float32", "bfloat16")
"""Precisions that a recipe can name: `auto`, the best format for the processor, or one of these."""

DEVICE = re.compile(r"[a-z]\w*(:\d{1,3})?")
"""Words for the device of a rank: one of both, a kind of accelerator that PyTorch knows, or one device of a kind."""
