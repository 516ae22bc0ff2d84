"""Preparation of a step for the fastest known computation: number format of products, layers, and memory that is free.

    weights float32 ─ rounded ─▶ bfloat16 products ─▶ float32 gradients ─ allreduce, update ─▶ weights float32

bfloat16 is for processors and accelerators that support it. PyTorch's autocast rounds the inputs of products. On a CPU
the layers after them (batch norm, relu, pooling) stay in bfloat16, and losses are float32.

convolutions               follow a plan
local response norms       channels last
parameters                 stay contiguous, as gradient buckets need that order; their names do not change
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from unisono.compute import PRECISIONS
from unisono.compute.convolution import plan_convolutions
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.response_norm import use_response_norms
from unisono.device import module_of
from unisono.errors import UsageError
from unisono.processor import HOST, processor


def prepare(model: nn.Module, plan: ConvolutionPlan) -> None:
    """Change the layers of `model` as listed above, convolutions by `plan`; use channels-last inputs."""
    plan_convolutions(model, plan)
    use_response_norms(model)


StepContext = Callable[[], AbstractContextManager[object]]
"""Function that returns the context in which a step is computed."""


def choose_dtype(requested: str, weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of products, for weights of dtype `weights` on a device.

    Raises UsageError for an unknown precision, and for bfloat16 on an accelerator that has none.
    """
    if requested not in PRECISIONS:
        raise UsageError(f"precision {requested!r}; there are {', '.join(PRECISIONS)}")
    if weights != torch.float32 or requested == "float32":
        return weights
    fits = has_bfloat16(device)
    if requested == "bfloat16" and not fits and device.type != HOST:
        raise UsageError(f'precision = "bfloat16": {device} computes none; take "float32"')
    return torch.bfloat16 if fits or requested == "bfloat16" else torch.float32


def has_bfloat16(device: torch.device) -> bool:
    """Return True where bfloat16 is faster on this host, or where PyTorch's autocast takes it on an accelerator."""
    if device.type == HOST:
        return processor().bfloat16
    supports = getattr(module_of(device), "is_bf16_supported", None)
    return torch.amp.is_autocast_available(device.type) and supports is not None and bool(supports())


def autocast_to(dtype: torch.dtype, weights: torch.dtype, device: str) -> AbstractContextManager[object]:
    """Return a context in which a model with weights of dtype `weights` computes its products in `dtype`."""
    return nullcontext() if dtype == weights else torch.autocast(device, dtype)


def release_free_memory() -> bool:
    """Return free memory to the system. Return True if this C library can do so (glibc's `malloc_trim`)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    library.malloc_trim(0)
    return True
