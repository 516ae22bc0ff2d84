"""Probes: what is measured, and the call that measures it on a rank.

    product      outputs = layer(inputs)           │ outputs.backward(gradient): both gradients
                 ├── forward ─────────────────────┤├── backward ─────────────────────────────┤
    memory       total += part       2 bytes are read and 1 is written for each byte of a tensor
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from unisono.errors import UsageError, install_command
from unisono.measure.timing import collective_call
from unisono.plan.exchange_cost import BYTES_OF_A_SUM
from unisono.plan.machines import FLOAT32_WIRE, LINEAR_KIND
from unisono.wires import encoded_share
from unisono.world import World

JPEG_QUALITY = 90
"""Quality of the image that is decoded: about that of photographs."""

BLOCK_BYTES = 4 << 20
"""Bytes of a read."""

MeasuredCall = Callable[[], tuple[float, ...]]
"""Function that returns the seconds of a call, or of its passes; none where this rank takes no part."""


@dataclass(frozen=True)
class Probe(ABC):
    """Measurement that all ranks make together."""

    @property
    @abstractmethod
    def work(self) -> float:
        """FLOPs, bytes or pixels of a rank's call: what its seconds stand for."""

    @property
    @abstractmethod
    def words(self) -> str:
        """Name with the sizes."""

    @abstractmethod
    def prepare(self, world: World, folder: Path | None) -> AbstractContextManager[MeasuredCall]:
        """Return the context with the call on this rank. Entered by all ranks; disks read from `folder`."""

    def schedule(self, world: World) -> str:  # noqa: ARG002
        """Return the schedule that is measured, of a collective."""
        return ""


def timed(action: Callable[[], object]) -> MeasuredCall:
    """Return a call that makes the action and returns its seconds."""

    def call() -> tuple[float]:
        start = time.perf_counter()
        action()
        return (time.perf_counter() - start,)

    return call


@dataclass(frozen=True)
class ProductProbe(Probe):
    """Linear layer, or convolution of square images with a square kernel, stride 1, for the samples of a rank.

    Its work are the FLOPs of the forward pass; the backward pass has twice as many.
    """

    kind: str
    samples: int
    inputs: int
    outputs: int
    side: int = 1
    """Side of the output in pixels."""
    kernel: int = 1
    """Side of the kernel."""

    @property
    def rows(self) -> int:
        """Rows of the product."""
        return self.samples * self.side**2

    @property
    def inner(self) -> int:
        """Multiply-adds of an output."""
        return self.inputs * self.kernel**2

    @property
    def work(self) -> float:
        return 2.0 * self.rows * self.inner * self.outputs

    @property
    def words(self) -> str:
        area = f" on {self.side}x{self.side}, kernel {self.kernel}x{self.kernel}" if self.kind != LINEAR_KIND else ""
        return f"{self.kind} {self.inputs} to {self.outputs}{area}, {self.samples} samples"

    @contextmanager
    def prepare(self, world: World, folder: Path | None) -> Iterator[MeasuredCall]:  # noqa: ARG002
        layer: nn.Module
        if self.kind == LINEAR_KIND:
            layer, inputs = nn.Linear(self.inputs, self.outputs), torch.ones(self.samples, self.inputs)
        else:
            layer = nn.Conv2d(self.inputs, self.outputs, self.kernel, padding=self.kernel // 2)
            inputs = torch.ones(self.samples, self.inputs, self.side, self.side)
        inputs.requires_grad_()

        def call() -> tuple[float, float]:
            layer.zero_grad()
            inputs.grad = None
            start = time.perf_counter()
            outputs = layer(inputs)
            between = time.perf_counter()
            outputs.backward(outputs.detach())
            return between - start, time.perf_counter() - between

        yield call


@dataclass(frozen=True)
class MemoryProbe(Probe):
    """Sum of two tensors of `bytes` bytes into one of them, on each rank; its work are the bytes read and written."""

    bytes: int

    @property
    def work(self) -> float:
        return BYTES_OF_A_SUM * self.bytes

    @property
    def words(self) -> str:
        return f"sum of {self.bytes >> 20} MiB on each rank"

    @contextmanager
    def prepare(self, world: World, folder: Path | None) -> Iterator[MeasuredCall]:  # noqa: ARG002
        total, part = torch.zeros(self.bytes // 4), torch.ones(self.bytes // 4)
        yield timed(lambda: total.add_(part))


@dataclass(frozen=True)
class DecodingProbe(Probe):
    """JPEG of a smooth image with some noise, decoded as a whole; its work are its pixels."""

    width: int
    height: int

    @property
    def work(self) -> float:
        return self.width * self.height

    @property
    def words(self) -> str:
        return f"JPEG of {self.width}x{self.height} pixels"

    @contextmanager
    def prepare(self, world: World, folder: Path | None) -> Iterator[MeasuredCall]:  # noqa: ARG002
        """Return the context with the call. Raises UsageError where the packages that decode images are missing."""
        try:
            from PIL import Image  # noqa: PLC0415  packages of images are optional

            from unisono.data.images.codec import ImageDecoder  # noqa: PLC0415
            from unisono.data.kinds.image import Box  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(f"{error.name} is missing: {install_command('data')}") from error
        shape = (self.height, self.width)
        slope = np.add.outer(np.arange(self.height), np.arange(self.width))[..., None] * 255 // sum(shape)
        noise = np.random.default_rng(0).integers(-16, 16, (*shape, 3))
        file = io.BytesIO()
        Image.fromarray((slope + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=JPEG_QUALITY)
        decoder, jpeg = ImageDecoder(3), file.getvalue()

        def decode() -> None:
            header = decoder.header(jpeg)
            decoder.decode(Box(0, 0, header.width, header.height), min(shape))

        yield timed(decode)


@dataclass(frozen=True)
class DiskProbe(Probe):
    """File that one rank of each node reads from one end to the other, past the system's memory of files."""

    bytes: int

    @property
    def work(self) -> float:
        return self.bytes

    @property
    def words(self) -> str:
        return f"file of {self.bytes >> 20} MiB"

    @contextmanager
    def prepare(self, world: World, folder: Path | None) -> Iterator[MeasuredCall]:
        """Write the file in `folder`, None for the system's for temporary files. Raises OSError where that fails."""
        if world.rank != world.placement.nodes[world.node][0]:
            yield lambda: ()
            return
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            block = os.urandom(BLOCK_BYTES)  # a disk that compresses gains nothing
            for _ in range(self.bytes // BLOCK_BYTES):
                file.write(block)
            os.fsync(file.fileno())
            buffer = memoryview(bytearray(BLOCK_BYTES))

            def call() -> tuple[float]:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                for offset in range(0, self.bytes, BLOCK_BYTES):
                    os.preadv(file.fileno(), [buffer], offset)
                return (time.perf_counter() - start,)

            yield call


@dataclass(frozen=True)
class CollectiveProbe(Probe):
    """Collective with the schedule that `auto` takes."""

    collective: str
    wire: str
    bytes: int
    """Bytes of the payload in float32."""

    @property
    def work(self) -> float:
        return self.bytes

    @property
    def words(self) -> str:
        return f"{self.collective} of {self.bytes >> 10} KiB, {self.wire}"

    @property
    def _encoding(self) -> str | None:
        return None if self.wire == FLOAT32_WIRE else self.wire

    @contextmanager
    def prepare(self, world: World, folder: Path | None) -> Iterator[MeasuredCall]:  # noqa: ARG002
        payload = world.empty(self.bytes // 4, torch.float32)
        yield timed(collective_call(world, self.collective, payload, wire=self._encoding))

    def schedule(self, world: World) -> str:
        sent, encoded = int(self.bytes * encoded_share(self._encoding)), self._encoding is not None
        return world.table.choose(self.collective, world.placement, sent, encoded).algorithm
