"""Parallel loading: the next batches are prepared while the network trains (Theano-MPI 3.3, Algorithm 1).

    training   step 0 ───── step 1 ───── step 2 ───── ...        the batch of a step is ready, unless loading is
    loading    batch 0, 1, 2 │ batch 3 ── │ batch 4 ── │          slower; the waiting time is recorded

PREFETCHED_BATCHES batches are prepared in advance, each by all threads: a free one takes the next of STRETCHES a thread
(DIMD's donkeys). Threads, not processes: Unisono never forks after MPI has started, and decoding releases the GIL.

On a device, the next batch is copied from pinned memory while the network computes on the one before (Theano-MPI 3.3:
"gpudata" beside "input"). The program's stream waits for the copy; the host does not:

    copies     batch 0 │ batch 1 ── │ batch 2 ── │               a stream of its own
    program            └▶ step 0 ── └▶ step 1 ── └▶ step 2 ──

The random numbers of a sample depend on the seed, the epoch and its number alone, so they are the same on any number
of ranks and after any resume.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from unisono.data.kinds import find_kind
from unisono.data.order import DRAWS_PER_SAMPLE, CounterRNG, Numbers, Sampler, uniform_numbers
from unisono.device import CopyStreams, choose_device, host_memory, module_of
from unisono.engine import Closing, Observe, observed
from unisono.errors import DecodeError, UsageError
from unisono.processor import AUTO, HOST
from unisono.schedules.pieces import bounds

if TYPE_CHECKING:
    from unisono.data.kinds import SampleTransform
    from unisono.data.pack.index import Index
    from unisono.data.storage import Storage
    from unisono.world import World

PROCESSOR = torch.device(HOST)
"""Device of a rank that has no accelerator."""

PREFETCHED_BATCHES = 2

STRETCHES = 4
"""Stretches of a batch for each thread: what a slow thread does not begin, the others do."""

DECODING = "decoding"
"""Name of the threads of a loader, and kind of the spans of their work."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs, in the layout of `SampleTransform.batch`, and labels, int64.

Images are (samples, channels, size, size) in channels-last memory, recordings (samples, windows, numbers), both with
labels (samples,). Texts are tokens, int64, (samples, tokens), and so are their labels.
"""


def cast_inputs(inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return inputs in the network's number format; integers, such as tokens, stay as they are."""
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def device_of_rank(name: str, world: World) -> torch.device:
    """Return the device of this rank, by a name that `choose_device` takes. Collective.

    Raises UsageError on all ranks where one has none, or another kind than rank 0.
    """
    if name == HOST:
        return PROCESSOR
    ranks = world.placement.nodes[world.placement.node_of(world.rank)]
    device = world.call_on_all(lambda: choose_device(name, ranks.index(world.rank), len(ranks)))
    kinds = world.all_gather_object(device.type) if name == AUTO else [device.type]
    if (other := next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)) is not None:
        raise UsageError(
            f'device = "{name}": rank 0 has {kinds[0]}, and rank {other} {kinds[other]}; take nodes with one kind of '
            f'device, or "{HOST}"'
        )
    return device


def to_device(batches: Iterable[Batch], device: torch.device) -> Generator[Batch]:
    """Yield batches in a device's memory, each of its own; one is read and copied ahead. On the host, yield the same.

    The calling thread's stream waits for each copy. Memory of `batches` may be reused after the batch that follows.
    """
    if device.type == HOST:
        yield from batches
        return
    copies, ahead = CopyStreams(device), deque[tuple[Batch, Any]]()
    try:
        for inputs, labels in batches:
            with copies.incoming():
                copy = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                ahead.append((copy, copies.record()))
            if len(ahead) > 1:
                yield _received(ahead[0], copies)
                ahead.popleft()[1].synchronize()
        if ahead:
            yield _received(ahead[0], copies)
    finally:
        for _, copied in ahead:
            copied.synchronize()


def _received(ahead: tuple[Batch, Any], copies: CopyStreams) -> Batch:
    """Return a batch for use on the calling thread's stream, behind its copy."""
    batch, copied = ahead
    copies.wait(copied)
    for tensor in batch:  # else its memory may hold another batch, while this stream still reads it
        tensor.record_stream(module_of(copies.device).current_stream(copies.device))
    return batch


class Running(Closing):
    """Object with batches under way, which are stopped before their samples move."""

    _running: Generator[Batch] | None = None
    _closed = False

    def _stop(self) -> None:
        """Stop the batches that are being prepared: a shuffle would move the samples that they read."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this {type(self).__name__} is closed; make another one")


@dataclass
class InputFacts:
    """Facts of a network's inputs, for which it is built."""

    classes: int
    """Number of classes, or of tokens."""
    channels: int
    """Input channels of the network: channels of an image, or numbers in a window of a recording."""
    first: torch.Tensor
    """Zeros with the shape and memory layout of a batch of one sample."""

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        last = self.first.dim() == 4 and self.first.is_contiguous(memory_format=torch.channels_last)
        return self.first.new_zeros(samples, *self.first.shape[1:]).contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )


class Reader(InputFacts, ABC):
    """Labelled samples of one set, which the ranks of a world read in batches, by their numbers."""

    sampler: Sampler
    """Order of the samples, and the place of each."""
    title: str
    """Name of the data set or folder of the pack."""
    names: tuple[str, ...]
    """Names of the classes, or of the tokens of texts."""
    samples: int
    """Number of samples, on all ranks together."""
    labels_are_tokens = False
    """True for texts, which have a label for each token."""
    labels_per_sample = 1
    """Labels of a sample: 1, its class, or the tokens of a window of text."""
    bytes_per_label: int | None = None
    """Bytes of text that a label stands for; None where they differ, and for classes."""

    @abstractmethod
    def batches(self, wanted: Iterable[Numbers], seed: int | None = None, epoch: int = 0) -> Generator[Batch]:
        """Yield a batch for each array of numbers; with a seed as in training, changed at random."""

    def in_turn(self, batch: int, alone: bool = False) -> Generator[Batch]:
        """Yield this rank's stretch of the samples, in batches of at most ceil(batch / ranks); if `alone`, all."""
        world = self.sampler.world
        rank, ranks = (0, 1) if alone else (world.rank, world.size)
        (start, stop), size = bounds(self.samples, ranks, rank), -(-batch // ranks)
        return self.batches(np.arange(first, min(stop, first + size)) for first in range(start, stop, size))

    def stop(self) -> None:
        """Stop the threads: all that a rank does by itself if the others cannot be waited for."""

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""


class Prefetcher(Reader):
    """Batches of a pack's samples, prepared in advance by threads of its own."""

    sampler: Storage

    def __init__(
        self,
        index: Index,
        storage: Storage,
        transform: Callable[[], SampleTransform],
        threads: int,
        name: str = DECODING,
        observe: Observe | None = None,
        device: torch.device = PROCESSOR,
    ) -> None:
        """Start the threads, called `name`; `transform` makes a transform for each.

        `observe` is called with the spans of reading and decoding. The memory of batches is one that `device` copies
        from.
        """
        about, self._kind = index.about, find_kind(index.about.kind)
        self.title, self.names, self.samples, self.sampler = str(index.folder), about.classes, len(index), storage
        self.labels_are_tokens = self._kind.labels_are_tokens
        self.labels_per_sample = self._kind.labels_per_sample(about.shape)
        self.bytes_per_label = self._kind.bytes_per_label(about.classes)
        self._labels = torch.from_numpy(index.label.astype(np.int64))
        self._dtype = torch.int64 if self.labels_are_tokens else torch.float32
        first = transform()  # loads libraries once here, not in all threads at once
        self.shape, self._batch = first.shape, first.batch
        blank = torch.zeros(1, *self.shape, dtype=self._dtype)
        super().__init__(len(about.classes), self.shape[-1], self._batch(blank))
        self._threads, self._own, self._make_transform = threads, threading.local(), transform
        self._pool, self._observe, self._device = ThreadPoolExecutor(threads, name, self._begin), observe, device
        self._spare: list[torch.Tensor] = []
        self._ended: list[torch.Tensor] = []  # last batches of iterators that have ended: spare after the next batch

    def batches(
        self, wanted: Iterable[Numbers], seed: int | None = None, epoch: int | Iterator[int] = 0
    ) -> Generator[Batch]:
        """Yield one batch for each array of sample numbers. A batch's memory is reused after the next batch, be
        it one of the next iterator.

        With a seed, samples are changed at random, as in training, by the epoch, of all or of each array; without, they
        are as in validation.
        Raises DecodeError, naming the sample, if one cannot be decoded. Closing the iterator stops the loading.
        """
        queue: deque[tuple[torch.Tensor, Numbers, list[Future[None]]]] = deque()
        source, epochs = iter(wanted), repeat(epoch) if isinstance(epoch, int) else epoch
        current: torch.Tensor | None = None

        def start_up_to(count: int) -> None:
            while len(queue) < count and (numbers := next(source, None)) is not None:
                queue.append(self._start(numbers, seed, next(epochs)))

        try:
            start_up_to(PREFETCHED_BATCHES + 1)
            while queue:
                memory, numbers, futures = queue[0]
                for future in futures:
                    future.result()
                queue.popleft()
                filled = memory[: len(numbers)]
                batch = self._batch(filled), self._kind.labels(filled, self._labels[numbers])
                # last: tensor operations release the GIL, which the threads take once they have work
                start_up_to(PREFETCHED_BATCHES)
                if current is not None:
                    self._spare.append(current)
                self._spare += self._ended
                self._ended.clear()
                current = memory
                yield batch
        finally:
            for memory, _, futures in queue:
                for begun in [future for future in futures if not future.cancel()]:
                    begun.exception()
                self._spare.append(memory)
            if current is not None:
                self._ended.append(current)

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.sampler.stop()

    def close(self) -> None:
        self.stop()
        self.sampler.close()

    def _start(
        self, numbers: Numbers, seed: int | None, epoch: int
    ) -> tuple[torch.Tensor, Numbers, list[Future[None]]]:
        """Submit a batch to the threads, in stretches of samples; return its memory, numbers and futures."""
        if self._kind.augments == ("none",):  # nothing is drawn
            seed = None
        with observed(self._observe, "read batch", "loading"):
            memory, samples = self._buffer(len(numbers)), self.sampler.samples(numbers)

        def transform(first: int, last: int) -> None:
            ids = numbers[first:last]
            draws = [None] * len(ids) if seed is None else uniform_numbers(seed, epoch, ids, DRAWS_PER_SAMPLE).tolist()
            with observed(self._observe, "decode", DECODING):
                for row, sample, drawn in zip(range(first, last), ids.tolist(), draws, strict=True):
                    rng = None if drawn is None else CounterRNG(drawn)
                    try:
                        self._own.transform.into(memory[row], samples[row].data, rng)
                    except DecodeError as error:
                        raise DecodeError(f"sample {sample} of {self.title}: {error}") from error

        pieces = STRETCHES * self._threads
        cuts = [bounds(len(numbers), pieces, piece) for piece in range(pieces)]
        return memory, numbers, [self._pool.submit(transform, first, last) for first, last in cuts if first < last]

    def _buffer(self, samples: int) -> torch.Tensor:
        """Return memory for a batch: that of a finished batch if it is large enough, else new memory."""
        for row, spare in enumerate(self._spare):
            if len(spare) >= samples:
                return self._spare.pop(row)
        self._spare.clear()
        memory = host_memory(samples * prod(self.shape), self._dtype, self._device)
        if self.labels_are_tokens:  # all inputs, then all labels: both are contiguous
            return memory.view(self.shape[0], samples, *self.shape[1:]).transpose(0, 1)
        return memory.view(samples, *self.shape)

    def _begin(self) -> None:
        """Initialise a thread: one OpenMP thread, and a transform of its own."""
        torch.get_num_threads()  # PyTorch sets a new thread's number on the first call
        threadpool_limits(1, user_api="openmp")
        self._own.transform = self._make_transform()
