"""Measured computing: products, a large sum, and the decoding of images, each on all ranks at once.

    product     outputs = layer(inputs)           │ outputs.backward(gradient): both gradients
                ├── forward ─────────────────────┤├── backward ─────────────────────────────┤
    sum         total += part       2 bytes are read and 1 is written for each byte of a tensor
    decoding    JPEG ─▶ pixels      by one thread of each rank

Layers are PyTorch's own, with the threads that each rank of a run has.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from unisono.errors import UsageError, install_command
from unisono.plan.measured_rows import LINEAR_KIND
from unisono.probe.probes import DecodingProbe, MemoryProbe, PreparedCall, ProductProbe

JPEG_QUALITY = 90
"""Quality of the image that is decoded: about that of photographs."""


@contextmanager
def prepare_product(probe: ProductProbe) -> Iterator[PreparedCall]:
    """Make the layer and its inputs. A call returns the seconds forward and backward."""
    layer: nn.Module
    if probe.kind == LINEAR_KIND:
        layer, inputs = nn.Linear(probe.inputs, probe.outputs), torch.ones(probe.samples, probe.inputs)
    else:
        layer = nn.Conv2d(probe.inputs, probe.outputs, probe.kernel, padding=probe.kernel // 2)
        inputs = torch.ones(probe.samples, probe.inputs, probe.side, probe.side)
    inputs.requires_grad_()

    def call() -> tuple[float, float]:
        layer.zero_grad()
        inputs.grad = None
        start = time.perf_counter()
        outputs = layer(inputs)
        between = time.perf_counter()
        outputs.backward(outputs.detach())
        return between - start, time.perf_counter() - between

    yield PreparedCall(call)


@contextmanager
def prepare_sum(probe: MemoryProbe) -> Iterator[PreparedCall]:
    """Make two tensors. A call sums one into the other."""
    total, part = torch.zeros(probe.bytes // 4), torch.ones(probe.bytes // 4)

    def call() -> tuple[float]:
        start = time.perf_counter()
        total.add_(part)
        return (time.perf_counter() - start,)

    yield PreparedCall(call)


@contextmanager
def prepare_decoding(probe: DecodingProbe) -> Iterator[PreparedCall]:
    """Encode a smooth image with some noise. Raises UsageError where the packages that decode images are missing."""
    try:
        from PIL import Image  # noqa: PLC0415  packages of images are optional

        from unisono.data.images.augmentation import Box  # noqa: PLC0415
        from unisono.data.images.codec import ImageDecoder  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(f"{error.name} is missing: {install_command('data')}") from error
    shape = (probe.height, probe.width)
    slope = np.add.outer(np.arange(probe.height), np.arange(probe.width))[..., None] * 255 // sum(shape)
    noise = np.random.default_rng(0).integers(-16, 16, (*shape, 3))
    file = io.BytesIO()
    Image.fromarray((slope + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=JPEG_QUALITY)
    decoder, jpeg = ImageDecoder(3), file.getvalue()

    def call() -> tuple[float]:
        start = time.perf_counter()
        header = decoder.header(jpeg)
        decoder.decode(Box(0, 0, header.width, header.height), min(shape))
        return (time.perf_counter() - start,)

    yield PreparedCall(call)
