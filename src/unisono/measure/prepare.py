"""Probes made ready: each becomes a call that returns its seconds, or those of its passes, on this rank.

    message      first ──▶ second ──▶ first        one rank of each node, all pairs at once; half the time of both
    product      outputs = layer(inputs)           │ outputs.backward(gradient): both gradients
                 ├── forward ─────────────────────┤├── backward ─────────────────────────────┤
    sum          total += part       2 bytes are read and 1 is written for each byte of a tensor
    decoding     JPEG ─▶ pixels      by one thread of each rank
    disk         write ─▶ fsync ─▶ drop the pages that the system holds of it ─▶ read, 4 MiB at a time
    collective   as `auto` makes it, on memory that the world gives, like buckets of gradients; the slowest rank counts

Layers are PyTorch's own, with the threads that each rank of a run has. One rank of each node reads a file, which has no
name, or loses it at once: the system removes it also after an error or a kill. On a file system in memory there is
nothing to drop, and what is measured is memory.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from unisono.errors import UsageError, install_command
from unisono.measure.links import leaders_of, there_and_back
from unisono.measure.probes import (
    CollectiveProbe,
    DecodingProbe,
    DiskProbe,
    MemoryProbe,
    MessageProbe,
    PreparedCall,
    Probe,
    ProductProbe,
)
from unisono.measure.timing import collective_call
from unisono.plan.machines import FLOAT32_WIRE, LINEAR_KIND
from unisono.wires import encoded_share
from unisono.world import World

JPEG_QUALITY = 90
"""Quality of the image that is decoded: about that of photographs."""

BLOCK_BYTES = 4 << 20
"""Bytes of a read."""


def prepare(probe: Probe, world: World, folder: Path | None) -> AbstractContextManager[PreparedCall]:
    """Return the context that makes a probe ready on this rank. Entered by all ranks; disks read from `folder`."""
    match probe:
        case MessageProbe():
            return prepare_message(probe, world)
        case ProductProbe():
            return prepare_product(probe)
        case MemoryProbe():
            return prepare_sum(probe)
        case DecodingProbe():
            return prepare_decoding(probe)
        case DiskProbe():
            return prepare_read(probe, folder, reads=world.rank == world.placement.nodes[world.node][0])
        case CollectiveProbe():
            return prepare_collective(probe, world)


@contextmanager
def prepare_message(probe: MessageProbe, world: World) -> Iterator[PreparedCall]:
    """Pair the nodes 0 and 1, 2 and 3, ...; with an odd number the last takes no part. Entered by all ranks."""
    peer, ball = world.node ^ 1, np.zeros(probe.bytes, np.uint8)
    with leaders_of(world) as nodes:
        if nodes is None or peer >= world.nodes:
            yield PreparedCall(take_no_part)
        else:
            yield PreparedCall(_timed(partial(there_and_back, nodes, peer, ball), parts=2))


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
    yield PreparedCall(_timed(lambda: total.add_(part)))


@contextmanager
def prepare_decoding(probe: DecodingProbe) -> Iterator[PreparedCall]:
    """Encode a smooth image with some noise. Raises UsageError where the packages that decode images are missing."""
    try:
        from PIL import Image  # noqa: PLC0415  packages of images are optional

        from unisono.data.images.codec import ImageDecoder  # noqa: PLC0415
        from unisono.data.kinds.image import Box  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(f"{error.name} is missing: {install_command('data')}") from error
    shape = (probe.height, probe.width)
    slope = np.add.outer(np.arange(probe.height), np.arange(probe.width))[..., None] * 255 // sum(shape)
    noise = np.random.default_rng(0).integers(-16, 16, (*shape, 3))
    file = io.BytesIO()
    Image.fromarray((slope + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=JPEG_QUALITY)
    decoder, jpeg = ImageDecoder(3), file.getvalue()

    def decode() -> None:
        header = decoder.header(jpeg)
        decoder.decode(Box(0, 0, header.width, header.height), min(shape))

    yield PreparedCall(_timed(decode))


@contextmanager
def prepare_read(probe: DiskProbe, folder: Path | None, reads: bool) -> Iterator[PreparedCall]:
    """Write the file in `folder` (None: the system's for temporary files), if this rank `reads`; a call reads it whole.

    Raises OSError where that fails.
    """
    if not reads:
        yield PreparedCall(take_no_part)
        return
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        block = os.urandom(BLOCK_BYTES)  # a disk that compresses gains nothing
        for _ in range(probe.bytes // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        buffer = memoryview(bytearray(BLOCK_BYTES))

        def call() -> tuple[float]:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            for offset in range(0, probe.bytes, BLOCK_BYTES):
                os.preadv(file.fileno(), [buffer], offset)
            return (time.perf_counter() - start,)

        yield PreparedCall(call)


@contextmanager
def prepare_collective(probe: CollectiveProbe, world: World) -> Iterator[PreparedCall]:
    """Make the payload. Entered by all ranks."""
    wire = None if probe.wire == FLOAT32_WIRE else probe.wire
    payload = world.empty(probe.bytes // 4, torch.float32)
    sent = int(probe.bytes * encoded_share(wire))
    schedule = world.table.choose(probe.collective, world.placement, sent, wire is not None).algorithm
    yield PreparedCall(_timed(collective_call(world, probe.collective, payload, wire=wire)), schedule)


def take_no_part() -> tuple[float, ...]:
    """Return no seconds: others measure."""
    return ()


def _timed(action: Callable[[], object], parts: int = 1) -> Callable[[], tuple[float]]:
    """Return a call that makes the action and returns its seconds, over the number of equal `parts` that it has."""

    def call() -> tuple[float]:
        start = time.perf_counter()
        action()
        return ((time.perf_counter() - start) / parts,)

    return call
