"""Feed from packs, in the memory of the ranks or read ahead from stripes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.kinds import find_kind
from unisono.data.kinds.kind import SampleTransform, TransformOptions
from unisono.data.loading import DECODING, Batch, Mode, Prefetcher
from unisono.data.order import own_numbers, permutation, share, steps_of, test_ranges
from unisono.data.pack.index import Index, read_index
from unisono.data.shuffle_options import ShuffleOptions
from unisono.data.splits import TEST_SPLITS, TRAIN_SPLITS, split_folder
from unisono.data.storage import AUTO, STREAMED
from unisono.data.storage.choose import resolve_storage
from unisono.data.storage.groups import form_groups, scope_note
from unisono.data.storage.storage import StorageOptions, read_storage
from unisono.engine import Observe, observed
from unisono.errors import PackError
from unisono.world import World


@dataclass(frozen=True)
class FeedOptions:
    """Options of a packed feed: place of the samples, transform to network inputs, threads and shuffle."""

    folder: Path
    storage: StorageOptions = field(default_factory=StorageOptions)
    transform: TransformOptions = field(default_factory=TransformOptions)
    threads: int = 1
    """Threads that decode samples, in each rank."""
    out_of_step: bool = False
    """True for ranks that draw and test by themselves: each node then has a copy of the test set."""
    shuffle: ShuffleOptions = field(default_factory=ShuffleOptions)
    """Interval and scope of the shuffle."""


class PackedFeed:
    """Feed from two packs: a training set and a test set."""

    def __init__(
        self,
        options: FeedOptions,
        world: World,
        seed: int,
        observe: Observe | None = None,
    ) -> None:
        """Read both packs into memory. Collective. Raises PackError on every rank.

        `observe` is called with the spans of reading, decoding and shuffling.
        """
        self._world, self._seed, self._observe, self._shuffle = world, seed, observe, options.shuffle
        train, test = world.call_on_all(
            lambda: [read_index(split_folder(options.folder, names)) for names in (TRAIN_SPLITS, TEST_SPLITS)]
        )
        check_splits(train, test)
        self.fingerprint = f"{train.fingerprint}, {test.fingerprint}"
        check_alike(options.folder, self.fingerprint, world)
        self.samples, self.test_samples, self.classes = len(train), len(test), len(train.about.classes)
        transform = transform_of(train, options.transform)
        test_storage = StorageOptions("replicated" if options.out_of_step else "partitioned")
        if options.out_of_step and options.storage.name == AUTO:
            raise PackError(
                'data.storage = "auto", but ranks out of step own other samples in another storage, which a replay has '
                'to repeat: set "partitioned" or "replicated"'
            )
        chosen = resolve_storage(options.storage, train, world)
        if chosen.options.name == STREAMED and options.shuffle != ShuffleOptions():
            raise PackError(
                f'data.shuffle = "{options.shuffle}", but {train.folder} is streamed, and nothing moves between ranks: '
                'set "epoch", or another data.storage'
            )
        with observed(observe, "read training set", "loading"):
            self._train = read_storage(chosen.options, train, world)
        copies = chosen.options.groups if chosen.options.name == "partitioned" else 1
        formed = form_groups(world.placement, copies).note
        crossing = scope_note(options.shuffle, world.placement)
        lines = ("storage", chosen.reason), ("storage", formed), ("shuffle", crossing)
        self.notes = tuple(f"{subject}: {line}" for subject, line in lines if line)
        """Lines on the storage and the shuffle: what was chosen, and what crosses switches."""
        with observed(observe, "read test set", "loading"):
            self._test = read_storage(test_storage, test, world)
        if self._train.order_name:  # in the middle of an epoch, a resumed run needs the same order
            self.fingerprint += f", {self._train.order_name}"
        self._own = 0
        if options.out_of_step:
            with observed(observe, "shuffle", "shuffle"):
                self._own = len(self._train.own(permutation(self.samples, seed, 0)))
        self._loader = Prefetcher(train, self._train, transform, options.threads, observe=observe)
        name = f"test {DECODING}"  # both may decode at once: a worker reads ahead while it tests
        self._tester = Prefetcher(test, self._test, transform, options.threads, name=name, observe=observe)
        self.channels = self._loader.shape[-1]
        self.labels_per_sample = find_kind(train.about.kind).labels_per_sample(train.about.shape)

    def epoch(self, epoch: int, batch: int, done: int) -> Generator[Batch]:
        """Shuffle the samples across ranks, then return this rank's share of each step."""
        with observed(self._observe, "shuffle", "shuffle"):
            order = self._train.order(self._seed, epoch, batch, self._shuffle)
            self._train.epoch(order, batch, done)
        steps = range(done, steps_of(self.samples, batch))
        wanted = (share(order, batch, step, self._world.rank, self._world.size) for step in steps)
        return self._loader.batches(wanted, Mode.TRAIN, self._seed, epoch)

    def test_batches(self, batch: int) -> Iterator[Batch]:
        """Return this rank's share of the test set."""
        parts = test_ranges(self.test_samples, batch, self._world.rank, self._world.size)
        return self._tester.batches((np.array(part) for part in parts), Mode.VALIDATE)

    def own_batches(self, batch: int, step: int) -> Iterator[Batch]:
        """Yield batches of the samples that are this rank's own in the storage."""
        assert self._own, "the feed is that of ranks out of step"

        def draw(epoch: int, done: int) -> NDArray[np.int64]:
            return self._train.own_epoch(self._seed, epoch, batch, done)

        found = own_numbers(draw, self._own, batch, step)
        for epoch, several in groupby(found, key=lambda pair: pair[0]):
            yield from self._loader.batches((numbers for _, numbers in several), Mode.TRAIN, self._seed, epoch)

    def all_test_batches(self, batch: int) -> Iterator[Batch]:
        """Yield the whole test set."""
        parts = test_ranges(self.test_samples, batch, 0, 1)
        return self._tester.batches((np.array(part) for part in parts), Mode.VALIDATE)

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return self._loader.blank(samples)

    def stop_threads(self) -> None:
        """Stop the threads: all that a rank does by itself if the others cannot be waited for."""
        self._loader.close()
        self._tester.close()

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self.stop_threads()
        self._train.close()
        self._test.close()


def check_alike(folder: Path, own: str, world: World) -> None:
    """Raise PackError unless all ranks read the same data, of which `own` is this rank's fingerprint. Collective."""
    for rank, fingerprint in enumerate(world.all_gather_object(own)):
        if fingerprint != own:
            raise PackError(f"{folder} is not the same on rank {rank} as on rank {world.rank}; copy it again")


def check_splits(train: Index, test: Index) -> None:
    """Raise PackError unless one network fits both packs: the same classes in one order, one kind, one shape."""
    one, other = train.about, test.about
    if one.classes != other.classes:
        unlike = sorted(set(one.classes) ^ set(other.classes)) or ["their order"]
        raise PackError(
            f"{train.folder} has {len(one.classes)} classes and {test.folder} {len(other.classes)}, which differ in "
            f"{unlike[0]}, so their labels differ in meaning; pack both with one command"
        )
    if one.kind != other.kind or one.shape != other.shape:
        raise PackError(
            f"{train.folder} holds {one.kind} samples {one.shape or ''}, {test.folder} {other.kind} "
            f"{other.shape or ''}; pack both in the same way"
        )


def transform_of(index: Index, options: TransformOptions) -> Callable[[], SampleTransform]:
    """Return the function that makes the transform of a thread. Raises PackError if `options` does not fit the pack."""
    kind = find_kind(index.about.kind)
    kind.check_augment(options.augment, index.folder)
    return kind.transform(index, options)
