"""Feed from packs in the memory of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.audio.transform import AudioTransform
from unisono.data.audio.windows import AUGMENTS as AUDIO_AUGMENTS
from unisono.data.audio.windows import AudioOptions
from unisono.data.images.augmentation import AUGMENTS as IMAGE_AUGMENTS
from unisono.data.images.augmentation import ImageOptions
from unisono.data.images.transform import ImageTransform
from unisono.data.loading import DECODING, Batch, Loader, Mode, SampleTransform
from unisono.data.order import own_numbers, permutation, share, steps_of, test_ranges
from unisono.data.pack.index import Index, read_index
from unisono.data.sources.source import AUDIO
from unisono.data.splits import TEST_SPLITS, TRAIN_SPLITS, split_folder
from unisono.data.storage.partitioned import PartitionedStorage
from unisono.data.storage.replicated import ReplicatedStorage
from unisono.engine import Observe, observed
from unisono.errors import PackError
from unisono.world import World


@dataclass(frozen=True)
class FeedOptions:
    """Options of a packed feed: storage of the pack, and transform of its samples to network inputs."""

    folder: Path
    replicated: bool = False
    """True for one copy in each node, shared by its ranks; False for a partition in each rank."""
    groups: int = 1
    """Number of copies of the pack, if it is partitioned."""
    size: int = 0
    """Width and height of the network's input images in pixels; 0 takes the size of raw images."""
    augment: str = "none"
    threads: int = 1
    """Threads that decode samples, in each rank."""
    windows: int = 8
    """Number of windows taken from a recording."""
    context: int = 15
    """Frames of 10 ms before the middle frame of a window, and as many after it."""
    whole_test: bool = False
    """True where each rank tests by itself: each node then has a copy of the test set."""


class PackedFeed:
    """Feed from two packs: a training set and a test set."""

    def __init__(
        self,
        options: FeedOptions,
        everyone: World,
        seed: int,
        sharing: World | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Read both packs into memory. Collective. Raises PackError on every rank.

        `sharing` is the world of the ranks that share each batch, where those are not `everyone`: layers are split.
        `observe` is called with the spans of reading, decoding and shuffling.
        """
        world = everyone if sharing is None else sharing
        self._world, self._seed, self._observe = world, seed, observe
        train, test = world.call_on_all(
            lambda: [read_index(split_folder(options.folder, names)) for names in (TRAIN_SPLITS, TEST_SPLITS)]
        )
        check_splits(train, test)
        self.fingerprint = f"{train.fingerprint}, {test.fingerprint}"
        for rank, fingerprint in enumerate(world.all_gather_object(self.fingerprint)):
            if fingerprint != self.fingerprint:
                raise PackError(
                    f"{options.folder} is not the same on rank {rank} as on rank {world.rank}; copy it again"
                )
        self.samples, self.test_samples, self.classes = len(train), len(test), len(train.about.classes)
        transform = transform_of(train, options)
        replicated, groups = options.replicated, options.groups
        with observed(observe, "read training set", "loading"):
            self._train = ReplicatedStorage(train, everyone) if replicated else PartitionedStorage(train, world, groups)
        with observed(observe, "read test set", "loading"):
            self._test = ReplicatedStorage(test, world) if options.whole_test else PartitionedStorage(test, world)
        self._own: NDArray[np.int64] | None = None
        if options.whole_test:
            self._own = self._draw_own(replicated)
        self._loader = Loader(train, self._train, transform, options.threads, observe=observe)
        name = f"test {DECODING}"  # both may decode at once: a worker reads ahead while it tests
        self._tester = Loader(test, self._test, transform, options.threads, name=name, observe=observe)
        self.channels = self._loader.shape[-1]

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """Shuffle the samples across ranks, then return this rank's share of each step."""
        order = self._shuffle(epoch, batch)
        steps = range(done, steps_of(self.samples, batch))
        wanted = (share(order, batch, step, self._world.rank, self._world.size) for step in steps)
        return self._loader.batches(wanted, Mode.TRAIN, self._seed, epoch)

    def test_batches(self, batch: int) -> Iterator[Batch]:
        """Return this rank's share of the test set."""
        parts = test_ranges(self.test_samples, batch, self._world.rank, self._world.size)
        return self._tester.batches((np.array(part) for part in parts), Mode.VALIDATE)

    def own_batches(self, batch: int, step: int) -> Iterator[Batch]:
        """Yield batches of this rank's own: from all samples of its node's copy, or from its partition."""
        assert self._own is not None, "the feed is made for ranks that draw and test by themselves"
        seed, rank = self._seed, self._world.rank
        found = own_numbers(self._own, seed, rank, batch, step)
        for epoch, several in groupby(found, key=lambda pair: pair[0]):
            yield from self._loader.batches((numbers for _, numbers in several), Mode.TRAIN, seed, epoch)

    def all_test_batches(self, batch: int) -> Iterator[Batch]:
        """Yield the whole test set."""
        parts = test_ranges(self.test_samples, batch, 0, 1)
        return self._tester.batches((np.array(part) for part in parts), Mode.VALIDATE)

    def _shuffle(self, epoch: int, batch: int) -> NDArray[np.int64]:
        """Shuffle the samples across ranks, for steps of `batch` samples. Return the order of the epoch."""
        with observed(self._observe, "shuffle", "shuffle"):
            order = permutation(self.samples, self._seed, epoch)
            self._train.epoch(order, batch)
        return order

    def _draw_own(self, replicated: bool) -> NDArray[np.int64]:
        """Return the samples that this rank trains on: all of a copy, or its share after one shuffle of all ranks."""
        if replicated:
            return np.arange(self.samples)
        order = self._shuffle(0, self.samples)
        return np.sort(share(order, self.samples, 0, self._world.rank, self._world.size))

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return self._loader.blank(samples)

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self._loader.close()
        self._tester.close()
        self._train.close()
        self._test.close()


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


def transform_of(index: Index, options: FeedOptions) -> Callable[[], SampleTransform]:
    """Return the function that makes the transform of a thread. Raises PackError if `options` does not fit the pack."""
    if index.about.kind == AUDIO:
        return partial(AudioTransform, audio_options(options))
    return partial(ImageTransform, image_options(index, options), index.about.shape)


def image_options(index: Index, options: FeedOptions) -> ImageOptions:
    """Return the options of a pack's images. Raises PackError if their size or the augmentation is unknown."""
    shape = index.about.shape
    if not options.size and (shape is None or shape[0] != shape[1]):
        raise PackError(f"{options.folder} has images of different sizes; set data.size to the size of the inputs")
    _check_augment(options, "images", IMAGE_AUGMENTS)
    size = options.size or shape[0]  # type: ignore[index]
    return ImageOptions(size, len(index.about.mean), index.about.mean, index.about.std, options.augment)


def audio_options(options: FeedOptions) -> AudioOptions:
    """Return the options of a pack's recordings. Raises PackError if the augmentation is not one of audio."""
    _check_augment(options, "audio", AUDIO_AUGMENTS)
    return AudioOptions(options.windows, options.context, options.augment)


def _check_augment(options: FeedOptions, what: str, known: tuple[str, ...]) -> None:
    if options.augment not in known:
        raise PackError(
            f"data.augment = {options.augment!r}, but {options.folder} holds {what}; the augmentations of these are "
            f"{', '.join(known)}"
        )
