"""Measured disk: one rank of each node reads a file of its own, from one end to the other.

    write ─▶ fsync ─▶ drop the pages that the system holds of it ─▶ read, 4 MiB at a time

The file has no name, or loses it at once, so the system removes it also after an error or a kill. On a file system in
memory there is nothing to drop, and what is measured is memory.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.probe.probes import DiskProbe, PreparedCall, take_no_part

BLOCK_BYTES = 4 << 20
"""Bytes of a read."""


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
