"""What feeds a run with batches: a data set that every rank holds, or a pack in the memory of the ranks."""

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
    """Batches for the ranks of a world. The order of an epoch follows from the seed alone, for any number of ranks."""

    samples: int
    """To train on, on all ranks together."""
    tested: int
    """Held out, on all ranks together."""
    classes: int
    channels: int
    """That a network is made for: colours of a picture, or numbers in a window of a recording."""
    mark: str
    """Tells what is trained on from other data, for a run that goes on."""

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """This rank's share of an epoch, from step `done` on; all ranks ask together, one epoch at a time."""
        ...

    def held_out(self, batch: int) -> Iterator[Batch]:
        """This rank's share of what is held out, in batches of at most `batch` of all ranks together."""
        ...

    def blank(self, samples: int) -> torch.Tensor:
        """Zeros, as the inputs of a batch are laid out."""
        ...

    def close(self) -> None:
        """Stop threads and give memory back, all ranks together."""
        ...


class InMemory:
    """A small data set that every rank holds whole."""

    def __init__(self, data: Dataset, world: World, seed: int) -> None:
        self._data, self._world, self._seed = data, world, seed
        self.samples, self.tested, self.classes = len(data.train), len(data.test), data.classes
        self.channels, self.mark = data.train.inputs.shape[1], f"{self.samples} in memory"

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """This rank's share of each step."""
        order = permutation(self.samples, self._seed, epoch)
        for step in range(done, steps_of(self.samples, batch)):
            rows = torch.from_numpy(share(order, batch, step, self._world.rank, self._world.size))
            yield self._data.train.inputs[rows], self._data.train.labels[rows]

    def held_out(self, batch: int) -> Iterator[Batch]:
        """This rank's share of what is held out."""
        for part in held_out(self.tested, batch, self._world.rank, self._world.size):
            yield self._data.test.inputs[part.start : part.stop], self._data.test.labels[part.start : part.stop]

    def blank(self, samples: int) -> torch.Tensor:
        """Zeros, as the inputs of a batch are laid out."""
        return torch.zeros(samples, *self._data.train.inputs.shape[1:])

    def close(self) -> None:
        """Nothing is to be given back."""


@dataclass(frozen=True)
class Hold:
    """How a pack is held and shown."""

    folder: Path
    whole: bool = False
    """A copy in each node, shared by its ranks; else a share in each rank."""
    groups: int = 1
    """Copies, where each rank has a share."""
    size: int = 0
    """Pixels across of what a network is shown of a picture; 0: as raw pictures are."""
    augment: str = "none"
    threads: int = 1
    """That decode, in each rank."""
    windows: int = 8
    """Places of a recording that a network hears."""
    context: int = 15
    """Frames of 10 ms that it hears before each place, and as many after it."""


class Packed:
    """A pack with samples to train on, and one with those that are held out."""

    def __init__(self, hold: Hold, world: World, seed: int) -> None:
        """Read both into memory, all ranks together. Raises PackError on every rank."""
        self._world, self._seed = world, seed
        train, test = world.on_all(lambda: [read_index(part_of(hold.folder, names)) for names in (TRAIN, HELD_OUT)])
        check_parts(train, test)
        self.mark = f"{train.mark}, {test.mark}"
        for rank, mark in enumerate(world.gather(self.mark)):
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
        """Shuffle, then this rank's share of each step."""
        order = permutation(self.samples, self._seed, epoch)
        self._train.epoch(order, batch)
        steps = range(done, steps_of(self.samples, batch))
        wanted = (share(order, batch, step, self._world.rank, self._world.size) for step in steps)
        return self._loader.batches(wanted, Mode.TRAIN, self._seed, epoch)

    def held_out(self, batch: int) -> Iterator[Batch]:
        """This rank's share of what is held out."""
        parts = held_out(self.tested, batch, self._world.rank, self._world.size)
        return self._tester.batches((np.array(part) for part in parts), Mode.VALIDATE)

    def blank(self, samples: int) -> torch.Tensor:
        """Zeros, as the inputs of a batch are laid out."""
        return self._loader.blank(samples)

    def close(self) -> None:
        """Stop the threads and give the memory back, all ranks together."""
        self._loader.close()
        self._tester.close()
        self._train.close()
        self._test.close()


def check_parts(train: Index, test: Index) -> None:
    """Raise PackError unless one network can be trained on one and tested with the other."""
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
    """What makes what shows the samples of a pack, for each thread one. Raises PackError where that is not known."""
    if index.about.kind == SOUND:
        return partial(Listen, hearing_of(hold))
    return partial(Show, view_of(index, hold), index.about.shape)


def view_of(index: Index, hold: Hold) -> View:
    """How the pictures of a pack are shown. Raises PackError where their size is not known."""
    shape = index.about.shape
    if not hold.size and (shape is None or shape[0] != shape[1]):
        raise PackError(f"{hold.folder}: pictures of any size; data.size says how large they are to be shown")
    _check_augment(hold, "pictures", OF_PICTURES)
    return View(hold.size or shape[0], len(index.about.mean), index.about.mean, index.about.deviation, hold.augment)  # type: ignore[index]


def hearing_of(hold: Hold) -> Hearing:
    """How the recordings of a pack are heard. Raises PackError where what is to be changed at random is a picture's."""
    _check_augment(hold, "sounds", OF_SOUNDS)
    return Hearing(hold.windows, hold.context, hold.augment)


def _check_augment(hold: Hold, what: str, known: tuple[str, ...]) -> None:
    if hold.augment not in known:
        raise PackError(
            f"data.augment = {hold.augment!r}, but {hold.folder} holds {what}; for them there are {', '.join(known)}"
        )
