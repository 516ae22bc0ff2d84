"""Copies of buckets between the host and a device.

Gradients on a device lie in memory like it on the device, as views, from and to which each bucket is copied:

    the program's stream   gradients of bucket 1 ┐ of bucket 2 ┐ ...
    outgoing stream                              └ pack 1, copy┴ pack 2, copy ...
    host                                                       └ sum of bucket 1, piece by piece as it arrives
    incoming stream                                                  └ copy, set_grads 1, update 1 ...
    the program's stream                                                                        └ next forward pass

Where a rank is alone, or MPI moves the memory of the device (`collectives/direct.py`), sums stay there: a bucket is
copied only where the host reads it. `record_progress` records where the program's stream is; `finish_copies` makes the
host wait for copies of a bucket, `join` the program's stream for all work on the incoming one.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from unisono.device import CopyStreams, pieces_of, pinned, unpin

LATEST = 0
"""Key of the newest mark, whichever bucket it was made for."""


class BucketCopies:
    """Memory on a device like `host`, by kind of bucket, and its copies."""

    def __init__(self, device: torch.device, host: Mapping[Any, torch.Tensor], stays: bool) -> None:
        """Allocate memory on the device like the host's; `stays`: no sum needs the host."""
        self._stays = stays
        self.flat = {kind: torch.zeros_like(memory, device=device) for kind, memory in host.items()}
        """Memory on the device, by kind."""
        for memory in host.values():
            pinned(memory, device)
            weakref.finalize(self, unpin, memory, device).atexit = False
        self._streams = CopyStreams(device)
        self._marks: dict[int, Any] = {}
        self._arriving: dict[int, list[tuple[slice, Any]]] = {}  # pieces on their way to the host, by key of the bucket
        self._unfetched: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}  # host, device, and the device's event
        self._leaving: dict[int, Any] = {}  # end of the last copy from the host, by key
        self._end: Any = None  # of what the incoming stream has got so far
        self.record_progress()

    def record_progress(self, key: int = LATEST) -> None:
        """Record what the calling thread's stream has queued so far, for a bucket whose gradients are complete."""
        self._marks[key] = self._marks[LATEST] = self._streams.record()

    def outgoing(self, key: int) -> AbstractContextManager[Any]:
        """Return a context on the outgoing stream, behind the bucket's mark."""
        return self._streams.outgoing(self._marks.get(key, self._marks[LATEST]), self._leaving.get(key))

    @contextmanager
    def incoming(self, marked: bool) -> Iterator[Any]:
        """Return a context on the incoming stream, if `marked` behind the newest mark."""
        with self._streams.incoming(*([self._marks[LATEST]] if marked else [])) as stream:
            try:
                yield stream
            finally:
                self._end = self._streams.record()

    def fetch(self, key: int, host: torch.Tensor, flat: torch.Tensor) -> None:
        """Begin the copy of a bucket to the host, on the current stream; or where sums stay, once the host reads it."""
        if self._stays:
            self._unfetched[key] = host, flat, self._streams.record()
            return
        arriving = []
        for piece in pieces_of(len(flat), flat.itemsize):
            host[piece].copy_(flat[piece], non_blocking=True)
            arriving.append((piece, self._streams.record()))
        self._arriving[key] = arriving

    def send(self, key: int, host: torch.Tensor, flat: torch.Tensor) -> None:
        """Begin the copy of a bucket from the host, on the incoming stream."""
        unfetched = self._unfetched.pop(key, None)
        with self.incoming(marked=False):
            if unfetched is not None:  # it is there, as the host has not read it
                self._streams.wait(unfetched[2])
                return
            flat.copy_(host, non_blocking=True)
            self._leaving[key] = self._streams.record()

    def staying(self, key: int) -> Generator[torch.Tensor, None, bool]:
        """Yield the bucket on the device, if it was not copied, for a sum on a stream of the thread's own. Return True
        if so."""
        if (unfetched := self._unfetched.get(key)) is None:
            return False
        host, flat, computed = unfetched
        with self._streams.apart(computed):
            yield flat
            self._unfetched[key] = host, flat, self._streams.record()
        return True

    def arrivals(self, key: int) -> Iterator[slice]:
        """Yield the pieces of a bucket in the host's memory, each once its copy has ended."""
        if (leaving := self._leaving.pop(key, None)) is not None:
            leaving.synchronize()
        for piece, event in self._arriving.pop(key, ()):
            event.synchronize()
            yield piece

    def finish_copies(self, key: int) -> None:
        """Wait until no copy of a bucket is under way, and the host has its contents."""
        if (unfetched := self._unfetched.pop(key, None)) is not None:
            host, flat, computed = unfetched
            with self._streams.outgoing(computed):
                host.copy_(flat)
        for _ in self.arrivals(key):
            pass

    def join(self) -> None:
        """Let the calling thread's stream wait for all that the incoming stream has got."""
        self._streams.wait(self._end)
