"""Number format of a step: bfloat16 where the processor supports it, with weights and sums in float32.

    weights float32 ─ rounded ─▶ bfloat16 products ─▶ float32 gradients ─ allreduce, update ─▶ weights float32

PyTorch's autocast rounds the inputs of products. On a CPU the layers after them (batch norm, relu, pooling) stay in
bfloat16, and losses are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from unisono.compute.formats import AUTO, PRECISIONS
from unisono.errors import UsageError
from unisono.processor_model import Processor

StepContext = Callable[[], AbstractContextManager[object]]
"""Function that returns the context in which a step is computed."""


def choose_dtype(requested: str, weights: torch.dtype, device: str, processor: Processor) -> torch.dtype:
    """Return the dtype of products, for weights of dtype `weights` on `device` ("cpu", "cuda")."""
    if weights != torch.float32:
        return weights
    if requested == AUTO:
        return torch.bfloat16 if device == "cuda" or processor.bfloat16 else torch.float32
    return torch.bfloat16 if requested == "bfloat16" else torch.float32


def autocast_to(dtype: torch.dtype, weights: torch.dtype, device: str) -> AbstractContextManager[object]:
    """Return a context in which a model with weights of dtype `weights` computes its products in `dtype`."""
    return nullcontext() if dtype == weights else torch.autocast(device, dtype)


def check_precision(requested: str) -> None:
    """Raise UsageError for an unknown precision."""
    if requested not in PRECISIONS:
        raise UsageError(f"precision {requested!r}; there are {', '.join(PRECISIONS)}")
