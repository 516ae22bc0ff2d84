"""Probes: what is measured, and the call that measures it on a rank.

    product      outputs = layer(inputs)           │ outputs.backward(gradient): both gradients
                 ├── forward ─────────────────────┤├── backward ─────────────────────────────┤
    memory       total += part       2 bytes are read and 1 is written for each byte of a tensor
    to_host      tensor of a device ─▶ pinned memory of the host; to_device: the other way
    decoding     JPEG ─▶ pixels      by one thread of each rank
    disk         write ─▶ fsync ─▶ drop the pages that the system holds of it ─▶ read, 4 MiB at a time
    collective   as `auto` makes it, on memory that the world gives, like buckets of gradients; the slowest rank counts

Layers are PyTorch's own, with the threads that each rank of a run has. One rank of each node reads a file, which has no
name, or loses it at once: the system removes it also after an error or a kill. On a file system in memory there is
nothing to drop, and what is measured is memory. A device queues what it is given: a call on it ends when that is done,
and products are queued several at a time, as in a step.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from unisono.data.loading import PROCESSOR
from unisono.device import host_memory, synchronize
from unisono.errors import UsageError, install_command
from unisono.measure.timing import collective_call
from unisono.plan.exchange_cost import BYTES_OF_A_SUM
from unisono.plan.machines import FLOAT32, FLOAT32_WIRE, LINEAR_KIND
from unisono.wires import encoded_share
from unisono.world import World

JPEG_QUALITY = 90
"""Quality of the image that is decoded: about that of photographs."""

QUEUED = 8
"""Products that a device is given at once."""

BLOCK_BYTES = 4 << 20
"""Bytes of a read."""

MeasuredCall = Callable[[], tuple[float, ...]]
"""Function that returns the seconds of a call, or of its passes; none where this rank takes no part."""


class Probe(NamedTuple):
    """Measurement that all ranks make together."""

    kind: str
    """"product", "memory", "device_memory", "to_host", "to_device", "decoding", "disk" or "collective"."""
    words: str
    """Name with the sizes."""
    work: float
    """FLOPs, bytes or pixels of a rank's call: what its seconds stand for."""
    prepare: Callable[[World, Path | None], AbstractContextManager[MeasuredCall]]
    """Function (world, folder) that returns the context with the call on this rank. Entered by all ranks; disks read
    from the folder."""
    row: tuple[Any, ...] = ()
    """First values of its row in a machine file."""
    schedule: Callable[[World], str] = lambda _: ""
    """Function that returns the schedule that is measured, of a collective."""


def timed(action: Callable[[], object], device: torch.device = PROCESSOR) -> MeasuredCall:
    """Return a call that makes the action, on a device until that has done it, and returns its seconds."""

    def call() -> tuple[float]:
        start = time.perf_counter()
        action()
        synchronize(device)
        return (time.perf_counter() - start,)

    return call


def product_probe(kind: str, *sizes: int, dtype: str = FLOAT32, device: torch.device = PROCESSOR) -> Probe:
    """Return the probe of a linear layer, or of a convolution of stride 1, for the samples of a rank.

    `sizes` are the samples, inputs and outputs, and of a convolution the side of the square output in pixels, and that
    of the square kernel. Its work are the FLOPs of the forward pass; the backward pass has twice as many. On a
    `device`, channels are last, as in runs.
    """
    samples, inputs, outputs, side, kernel = (*sizes, 1, 1)[:5]
    linear, rows, inner = kind == LINEAR_KIND, samples * side**2, inputs * kernel**2
    area = "" if linear else f" on {side}x{side}, kernel {kernel}x{kernel}"
    on_host = device == PROCESSOR
    form, calls = torch.contiguous_format if on_host or linear else torch.channels_last, 1 if on_host else QUEUED

    @contextmanager
    def prepare(_: World, __: Path | None) -> Iterator[MeasuredCall]:
        layer = nn.Linear(inputs, outputs) if linear else nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
        ones = torch.ones((samples, inputs) if linear else (samples, inputs, side, side))
        layer, given = layer.to(device), ones.to(device, memory_format=form).requires_grad_()

        def call() -> tuple[float, float]:
            layer.zero_grad()
            given.grad = None
            synchronize(device)
            start = time.perf_counter()
            with nullcontext() if dtype == FLOAT32 else torch.autocast(device.type, torch.bfloat16):
                found = [layer(given) for _ in range(calls)]
            synchronize(device)
            between = time.perf_counter()
            for one in found:
                one.backward(one.detach())
            synchronize(device)
            return (between - start) / calls, (time.perf_counter() - between) / calls

        yield call

    words = f"{kind} {inputs} to {outputs}{area}, {samples} samples" + (f" in {dtype}" if dtype != FLOAT32 else "")
    row = kind, rows, inner, outputs, kernel**2, dtype
    return Probe("product", words, 2.0 * rows * inner * outputs, prepare, row)


def memory_probe(nbytes: int, device: torch.device = PROCESSOR) -> Probe:
    """Return the probe of a sum of two tensors into one of them, on each rank; its work are the bytes read and
    written."""

    @contextmanager
    def prepare(_: World, __: Path | None) -> Iterator[MeasuredCall]:
        total, part = (torch.full((nbytes // 4,), float(number), device=device) for number in range(2))
        yield timed(lambda: total.add_(part), device)

    kind, place = ("memory", "rank") if device == PROCESSOR else ("device_memory", f"rank's {device.type}")
    return Probe(kind, f"sum of {nbytes >> 20} MiB on each {place}", BYTES_OF_A_SUM * nbytes, prepare)


def copy_probe(kind: str, nbytes: int, device: torch.device) -> Probe:
    """Return the probe of a copy between pinned memory and a device, "to_host" or "to_device", by each rank."""

    @contextmanager
    def prepare(_: World, __: Path | None) -> Iterator[MeasuredCall]:
        pair = host_memory(nbytes // 4, torch.float32, device), torch.zeros(nbytes // 4, device=device)
        target, source = pair if kind == "to_host" else reversed(pair)
        yield timed(lambda: target.copy_(source, non_blocking=True), device)

    return Probe(kind, f"copy of {nbytes >> 20} MiB {kind.replace('_', ' ')}", nbytes, prepare)


def decoding_probe(width: int, height: int) -> Probe:
    """Return the probe of a JPEG of a smooth image with some noise, decoded as a whole; its work are its pixels.

    Its context raises UsageError where the packages that decode images are missing.
    """

    @contextmanager
    def prepare(_: World, __: Path | None) -> Iterator[MeasuredCall]:
        try:
            from PIL import Image  # noqa: PLC0415  packages of images are optional

            from unisono.data.images.codec import ImageDecoder  # noqa: PLC0415
            from unisono.data.kinds.image import Box  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(f"{error.name} is missing: {install_command('data')}") from error
        slope = np.add.outer(np.arange(height), np.arange(width))[..., None] * 255 // (height + width)
        noise = np.random.default_rng(0).integers(-16, 16, (height, width, 3))
        file = io.BytesIO()
        Image.fromarray((slope + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=JPEG_QUALITY)
        decoder, jpeg = ImageDecoder(3), file.getvalue()

        def decode() -> None:
            header = decoder.header(jpeg)
            decoder.decode(Box(0, 0, header.width, header.height), min(height, width))

        yield timed(decode)

    return Probe("decoding", f"JPEG of {width}x{height} pixels", width * height, prepare)


def disk_probe(nbytes: int) -> Probe:
    """Return the probe of a file that one rank of each node reads from one end to the other, past the system's memory
    of files.

    Its context writes the file in the folder, None for the system's for temporary files. Raises OSError where that
    fails.
    """

    @contextmanager
    def prepare(world: World, folder: Path | None) -> Iterator[MeasuredCall]:
        if world.rank != world.placement.nodes[world.node][0]:
            yield lambda: ()
            return
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            block = os.urandom(BLOCK_BYTES)  # a disk that compresses gains nothing
            for _ in range(nbytes // BLOCK_BYTES):
                file.write(block)
            os.fsync(file.fileno())
            buffer = memoryview(bytearray(BLOCK_BYTES))

            def call() -> tuple[float]:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                for offset in range(0, nbytes, BLOCK_BYTES):
                    os.preadv(file.fileno(), [buffer], offset)
                return (time.perf_counter() - start,)

            yield call

    return Probe("disk", f"file of {nbytes >> 20} MiB", nbytes, prepare)


def collective_probe(collective: str, wire: str, nbytes: int) -> Probe:
    """Return the probe of a collective with the schedule that `auto` takes, on so many bytes in float32."""
    encoding = None if wire == FLOAT32_WIRE else wire

    @contextmanager
    def prepare(world: World, _: Path | None) -> Iterator[MeasuredCall]:
        payload = world.empty(nbytes // 4, torch.float32)
        yield timed(collective_call(world, collective, payload, wire=encoding))

    def schedule(world: World) -> str:
        sent = int(nbytes * encoded_share(encoding))
        return world.table.choose(collective, world.placement, sent, encoding is not None).algorithm

    words = f"{collective} of {nbytes >> 10} KiB, {wire}"
    return Probe("collective", words, nbytes, prepare, (collective, wire, nbytes), schedule)
