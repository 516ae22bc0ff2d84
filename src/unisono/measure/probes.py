"""Probes: what is measured, the call that measures it on a rank, and the plan of all, with the seconds that were read.

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

The plan has parts with their share of the time (`docs/planning.md`), and the probes of each part, the cheapest first. A
probe has a share of what is left of its part in proportion to the root of its work: long ones have more time, short
ones more trials.

Worked example: 24 s are left for two probes of 1 and 16 MiB. Their roots are 1 and 4: the first has 4.8 s. If a call of
it takes 0.25 s, 18 trials follow the first call; the other probe then has 19.2 s, and is expected to take 4 s a call.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from math import sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from unisono.data.loading import PROCESSOR
from unisono.device import host_memory, synchronize
from unisono.errors import UsageError, install_command
from unisono.measure.links import Links
from unisono.measure.timing import LONG_CALL_SECONDS, MAX_TRIALS, collective_call
from unisono.network.choice import ChoiceRow
from unisono.placement import Placement
from unisono.plan.choose import MEASURED_BUCKET_BYTES
from unisono.plan.machines import BFLOAT16, BYTES_OF_A_SUM, CONVOLUTION_KIND, FLOAT32, FLOAT32_WIRE, LINEAR_KIND
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
    label: str
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
                results = [layer(given) for _ in range(calls)]
            synchronize(device)
            between = time.perf_counter()
            for result in results:
                result.backward(result.detach())
            synchronize(device)
            return (between - start) / calls, (time.perf_counter() - between) / calls

        yield call

    label = f"{kind} {inputs} to {outputs}{area}, {samples} samples" + (f" in {dtype}" if dtype != FLOAT32 else "")
    row = kind, rows, inner, outputs, kernel**2, dtype
    return Probe("product", label, 2.0 * rows * inner * outputs, prepare, row)


def memory_probe(nbytes: int, device: torch.device = PROCESSOR) -> Probe:
    """Return the probe of a sum of two tensors into one of them, on each rank; its work are the bytes read and
    written."""

    @contextmanager
    def prepare(_: World, __: Path | None) -> Iterator[MeasuredCall]:
        total, part = (torch.full((nbytes // 4,), float(value), device=device) for value in range(2))
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

            from unisono.data.kinds.image import Box  # noqa: PLC0415
            from unisono.data.kinds.image_transform import ImageDecoder  # noqa: PLC0415
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

    label = f"{collective} of {nbytes >> 10} KiB, {wire}"
    return Probe("collective", label, nbytes, prepare, (collective, wire, nbytes), schedule)


SHARES = {
    "links": 0.15,
    "products": 0.25,
    "memory": 0.05,
    "decoding": 0.05,
    "disk": 0.05,
    "collectives": 0.45,
}
"""Share of the time of each part, in the order in which they are measured."""

COLLECTIVE_BYTES = (MEASURED_BUCKET_BYTES[0], 2 << 20, MEASURED_BUCKET_BYTES[1])
"""Payloads in bytes: those of a run's own measurements, and one between them."""

NARROW_WIRE = "bfloat16"
"""Wire of 16 bits that is measured beside float32."""

SUM_BYTES = 64 << 20
"""Bytes of each tensor of a sum: more than caches hold."""

DISK_BYTES = (8 << 20, 64 << 20, 256 << 20)
"""Bytes of files: the largest that there is time for counts."""

TIMES_ON_A_DEVICE = 16
"""Times the samples of the sizes below that products on a device have, too: short ones last as long as their calls."""

LINEAR_SIZES = (
    *((8, 256, 256), (64, 256, 256), (8, 1024, 1024), (64, 1024, 1024)),
    *((512, 512, 2048), (512, 1024, 1024), (64, 4096, 4096)),
)
"""Rows of a rank, inputs and outputs of linear layers: short and tall, narrow and wide."""

CONVOLUTION_SIZES = (
    *((32, 16, 16, 32, 3), (32, 64, 64, 8, 3), (8, 3, 64, 56, 7), (8, 64, 64, 56, 1), (8, 64, 64, 56, 3)),
    *((8, 128, 128, 28, 3), (8, 256, 1024, 14, 1), (8, 256, 256, 14, 3), (8, 512, 512, 7, 3)),
)
"""Samples of a rank, input channels, output channels, side of the output, side of the kernel: those of residual
networks on images of 32 and of 224 pixels."""


class ProbePart(NamedTuple):
    """Part of a probe."""

    name: str
    ends: float
    """Seconds since the beginning at which it ends."""
    probes: tuple[Probe, ...]
    """Probes, the cheapest first; none for the links, which `links.py` measures as a whole."""


class ProbePlan(NamedTuple):
    """Parts that are measured, and the reason for each that is not."""

    parts: tuple[ProbePart, ...]
    left_out: tuple[str, ...]


def plan_probe(
    seconds: float, placement: Placement, disk: bool, device: torch.device = PROCESSOR, bfloat16: bool = False
) -> ProbePlan:
    """Return the parts for these ranks; `disk` is True where a folder to read from is given. Products are the
    `device`'s, in bfloat16 too where that is True; its memory and copies are measured beside the host's memory."""
    on_host, nodes = device == PROCESSOR, len(placement.nodes)
    dtypes = (FLOAT32, BFLOAT16) if bfloat16 else (FLOAT32,)
    uneven = "" if len(set(map(len, placement.nodes))) == 1 else "no plan has nodes with unequal numbers of ranks"
    reasons = {
        "links": "one node has no links" if nodes == 1 else "",
        "collectives": "a single rank has no collectives" if placement.ranks == 1 else uneven,
        "disk": "" if disk else "no folder was given: --disk FOLDER",
    }
    copies = (copy_probe(kind, SUM_BYTES, device) for kind in ("to_host", "to_device"))
    probes: dict[str, Sequence[Probe]] = {
        "links": [],
        "products": [
            product_probe(kind, times * samples, *sizes, dtype=dtype, device=device)
            for times in ((1,) if on_host else (1, TIMES_ON_A_DEVICE))
            for kind, of_kind in ((LINEAR_KIND, LINEAR_SIZES), (CONVOLUTION_KIND, CONVOLUTION_SIZES))
            for samples, *sizes in of_kind
            for dtype in dtypes
        ],
        "memory": [memory_probe(SUM_BYTES), *([] if on_host else [memory_probe(SUM_BYTES, device), *copies])],
        "decoding": [decoding_probe(500, 375)],
        "disk": [disk_probe(nbytes) for nbytes in DISK_BYTES],
        "collectives": list(_collectives(nodes)),
    }
    ends = accumulate(SHARES.values())
    parts = tuple(
        ProbePart(name, seconds * end, tuple(sorted(probes[name], key=lambda probe: probe.work)))
        for name, end in zip(SHARES, ends, strict=True)
        if not reasons.get(name)
    )
    return ProbePlan(parts, tuple(f"{name}: {reason}" for name, reason in reasons.items() if reason))


def _collectives(nodes: int) -> Iterator[Probe]:
    """Yield the collectives of BSP and of Sharded, whose weights are not encoded. Within a node nothing is encoded."""
    for nbytes in COLLECTIVE_BYTES:
        for wire in (FLOAT32_WIRE, NARROW_WIRE)[: 1 + (nodes > 1)]:
            yield collective_probe("allreduce", wire, nbytes)
            yield collective_probe("reduce_scatter", wire, nbytes)
        yield collective_probe("all_gather", FLOAT32_WIRE, nbytes)


def share_of(remaining: float, works: Sequence[float]) -> float:
    """Return the seconds of the first of the probes with these works, of those that remain for all."""
    return max(0.0, remaining) * sqrt(works[0]) / sum(map(sqrt, works))


def fits(expected: float, remaining: float) -> bool:
    """Return True if a probe whose calls are expected to take so long can be called twice."""
    return 2 * expected <= remaining


def trials(first: float, left: float) -> int:
    """Return the number of trials in `left` seconds after a first call of so many seconds: 1 to MAX_TRIALS, or 0 after
    a long first call, which counts as a trial itself.

    >>> trials(0.01, 1.0), trials(0.2, 0.1), trials(0.5, 1.2), trials(2.0, 1.0)
    (41, 1, 2, 0)
    """
    least = 0 if first > LONG_CALL_SECONDS else 1
    return max(least, min(MAX_TRIALS, int(max(0.0, left) / max(first, 1e-9))))


Trial = tuple[tuple[float, ...], ...]
"""Seconds of a call by rank: of each of its passes; none where the rank took no part."""


class ProbeReading(NamedTuple):
    """Seconds of a probe, the same on every rank."""

    probe: Probe
    trials: tuple[Trial, ...]
    preparation: float
    """Seconds before the first call."""
    schedule: str = ""
    """Schedule of a collective."""


class ProbeFindings(NamedTuple):
    """Findings of a whole plan, or of tuning, which measures links and has the rows."""

    links: Links | None
    readings: tuple[ProbeReading, ...]
    left_out: tuple[str, ...]
    """Reason for each part or probe that was not measured."""
    seconds: float
    """Seconds that all took."""
    rows: Mapping[str, tuple[ChoiceRow, ...]] = MappingProxyType({})
    """Rows of the table of choices, by collective."""


def slowest(trial: Sequence[Sequence[float]]) -> float:
    """Return the seconds of the slowest rank, all its passes.

    >>> slowest([(1.0, 2.0), (), (2.5,)])
    3.0
    """
    return max(map(sum, trial), default=0.0)
