"""Feeds give a run its batches, from a data set that every rank holds or from a pack in the memory of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from unisono.data.catalogue import HELD_OUT, TRAIN, part_of
from unisono.data.dataset import Dataset
from unisono.data.loading import Batch, Loader, Mode, Showing
from unisono.data.memory.partitioned import Partitioned
from unisono.data.memory.whole import Whole
from unisono.data.order import held_out, permutation, share, steps_of
from unisono.data.pack.index import Index, read_index
from unisono.data.pictures.showing import Show
from unisono.data.pictures.view import AUGMENTS as OF_PICTURES
from unisono.data.pictures.view import View
from unisono.data.sounds.hearing import AUGMENTS as OF_SOUNDS
from unisono.data.sounds.hearing import Hearing
from unisono.data.sounds.listening import Listen
from unisono.data.sources.source import SOUND
from unisono.errors import PackError
from unisono.world import World


class Feed(Protocol):
    """Batches for the ranks of a world. The order of an epoch depends on the seed alone, not on the number of ranks."""

    samples: int
    """Number of training samples, on all ranks together."""
    tested: int
    """Number of test samples, on all ranks together."""
    classes: int
    channels: int
    """Input channels of the network: channels of an image, or numbers in a window of a recording."""
    mark: str
    """Fingerprint of the data, with which a resumed run checks that they are the same."""

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """Return this rank's share of an epoch from step `done` on. Collective; one epoch at a time."""
        ...

    def held_out(self, batch: int) -> Iterator[Batch]:
        """Return this rank's share of the test set, in batches of at most ceil(batch / ranks) samples."""
        ...

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        ...

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        ...


class InMemory:
    """Feed from a small data set that every rank holds whole."""

    def __init__(self, data: Dataset, world: World, seed: int) -> None:
        self._data, self._world, self._seed = data, world, seed
        self.samples, self.tested, self.classes = len(data.train), len(data.test), data.classes
        self.channels, self.mark = data.train.inputs.shape[1], f"{self.samples} in memory"

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """Yield this rank's share of each step."""
        order = permutation(self.samples, self._seed, epoch)
        for step in range(done, steps_of(self.samples, batch)):
            rows = torch.from_numpy(share(order, batch, step, self._world.rank, self._world.size))
            yield self._data.train.inputs[rows], self._data.train.labels[rows]

    def held_out(self, batch: int) -> Iterator[Batch]:
        """Yield this rank's share of the test set."""
        for part in held_out(self.tested, batch, self._world.rank, self._world.size):
            yield self._data.test.inputs[part.start : part.stop], self._data.test.labels[part.start : part.stop]

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return torch.zeros(samples, *self._data.train.inputs.shape[1:])

    def close(self) -> None:
        """Do nothing: there are no threads and no shared memory."""


@dataclass(frozen=True)
class Hold:
    """Settings of a packed feed: storage of the pack, and conversion of its samples to network inputs."""

    folder: Path
    whole: bool = False
    """True for one copy in each node, shared by its ranks; False for a share in each rank."""
    groups: int = 1
    """Number of copies of the pack, if each rank holds a share."""
    size: int = 0
    """Width and height of the network's input images in pixels; 0 takes the size of raw images."""
    augment: str = "none"
    threads: int = 1
    """Threads that decode samples, in each rank."""
    windows: int = 8
    """Number of windows taken from a recording."""
    context: int = 15
    """Frames of 10 ms before the middle frame of a window, and as many after it."""


class Packed:
    """Feed from two packs, one with the training set and one with the test set."""

    def __init__(self, hold: Hold, world: World, seed: int) -> None:
        """Read both packs into memory. Collective. Raises PackError on every rank."""
        self._world, self._seed = world, seed
        train, test = world.call_on_all(
            lambda: [read_index(part_of(hold.folder, names)) for names in (TRAIN, HELD_OUT)]
        )
        check_parts(train, test)
        self.mark = f"{train.mark}, {test.mark}"
        for rank, mark in enumerate(world.all_gather_object(self.mark)):
            if mark != self.mark:
                raise PackError(f"{hold.folder} is not the same on rank {rank} as on rank {world.rank}; copy it anew")
        self.samples, self.tested, self.classes = len(train), len(test), len(train.about.classes)
        showing = showing_of(train, hold)
        self._train = Whole(train, world) if hold.whole else Partitioned(train, world, hold.groups)
        self._test = Partitioned(test, world)
        self._loader = Loader(train, self._train, showing, hold.threads)
        self._tester = Loader(test, self._test, showing, hold.threads)
        self.channels = self._loader.shape[-1]

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """Shuffle the samples across ranks, then return this rank's share of each step."""
        order = permutation(self.samples, self._seed, epoch)
        self._train.epoch(order, batch)
        steps = range(done, steps_of(self.samples, batch))
        wanted = (share(order, batch, step, self._world.rank, self._world.size) for step in steps)
        return self._loader.batches(wanted, Mode.TRAIN, self._seed, epoch)

    def held_out(self, batch: int) -> Iterator[Batch]:
        """Return this rank's share of the test set."""
        parts = held_out(self.tested, batch, self._world.rank, self._world.size)
        return self._tester.batches((np.array(part) for part in parts), Mode.VALIDATE)

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return self._loader.blank(samples)

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self._loader.close()
        self._tester.close()
        self._train.close()
        self._test.close()


def check_parts(train: Index, test: Index) -> None:
    """Raise PackError unless one network fits both packs: the same classes in one order, one kind, one shape."""
    one, other = train.about, test.about
    if one.classes != other.classes:
        unlike = sorted(set(one.classes) ^ set(other.classes)) or ["their order"]
        raise PackError(
            f"{train.folder} has {len(one.classes)} classes and {test.folder} {len(other.classes)}, which differ in "
            f"{unlike[0]}, so their labels do not mean the same; pack both with one command"
        )
    if one.kind != other.kind or one.shape != other.shape:
        raise PackError(
            f"{train.folder} holds {one.kind} samples {one.shape or ''}, {test.folder} {other.kind} "
            f"{other.shape or ''}; pack both alike"
        )


def showing_of(index: Index, hold: Hold) -> Callable[[], Showing]:
    """Return the function with which each thread makes its converter. Raises PackError if `hold` does not fit."""
    if index.about.kind == SOUND:
        return partial(Listen, hearing_of(hold))
    return partial(Show, view_of(index, hold), index.about.shape)


def view_of(index: Index, hold: Hold) -> View:
    """Return the view of a pack's images. Raises PackError if their size or the augmentation is not known."""
    shape = index.about.shape
    if not hold.size and (shape is None or shape[0] != shape[1]):
        raise PackError(f"{hold.folder}: pictures of any size; data.size says how large they are to be shown")
    _check_augment(hold, "pictures", OF_PICTURES)
    return View(hold.size or shape[0], len(index.about.mean), index.about.mean, index.about.deviation, hold.augment)  # type: ignore[index]


def hearing_of(hold: Hold) -> Hearing:
    """Return the windows of a pack's recordings. Raises PackError if the augmentation is not one of recordings."""
    _check_augment(hold, "sounds", OF_SOUNDS)
    return Hearing(hold.windows, hold.context, hold.augment)


def _check_augment(hold: Hold, what: str, known: tuple[str, ...]) -> None:
    if hold.augment not in known:
        raise PackError(
            f"data.augment = {hold.augment!r}, but {hold.folder} holds {what}; for them there are {', '.join(known)}"
        )
