"""Feed: the batches of a run, from a training set and a test set, in memory on every rank (`builtin.py`) or from packs.

order of an epoch (`order.py`) ── share of this rank, step by step ──▶ reader ──▶ batches
                                                                        a data set in memory: rows of tensors
                                                                        a pack: decoded ahead (`loading.py`)

A pack is in the memory of the ranks, or read from its stripes or files (`storage/`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unisono.data.kinds import find_kind, make_transform
from unisono.data.loading import DECODING, PROCESSOR, Batch, InputFacts, Prefetcher, Reader
from unisono.data.options import DataOptions
from unisono.data.order import (
    Numbers,
    ShuffleOptions,
    own_numbers,
    parse_shuffle,
    permutation,
    scope_note,
    share,
    steps_of,
)
from unisono.data.pack import TEST_SPLITS, TRAIN_SPLITS, check_installed, split_folder
from unisono.data.storage import AUTO, FILES, PARTITIONED, REPLICATED, STORAGES, STREAMED, read_storage
from unisono.engine import Observe, observed
from unisono.errors import PackError
from unisono.world import World

if TYPE_CHECKING:
    from unisono.data.pack.index import Index


def is_same_data(left: str, right: str) -> bool:
    """Return True if two fingerprints are of the same data; that of a pack of an older release lacks some words, but
    not the last, which may name a storage.

    >>> is_same_data("40 13c62b16, 12 2f471622 files", "40 13c62b16 00c0ffee, 12 2f471622 0badcafe files")
    True
    """
    left_packs, right_packs = ([each.split(" ") for each in packs.split(", ")] for packs in (left, right))
    pairs = [sorted(pair, key=len) for pair in zip(left_packs, right_packs, strict=False)]
    return len(left_packs) == len(right_packs) and all({*a} <= {*b} for a, b in pairs)


def has_other_classes(left: str, right: str) -> bool:
    """Return True if the training sets of two fingerprints have other classes, or another order of them; those of packs
    of older releases do not tell.

    >>> has_other_classes("40 13c62b16 00c0ffee 0ddba11s, 12 2f471622", "44 13c62b17 0badcafe 0decade5")
    True
    """
    first = [each.split(", ")[0].split(" ") for each in (left, right)]
    classes = [[word for word in pack if word not in STORAGES][3:4] for pack in first]
    return all(classes) and classes[0] != classes[1]


@dataclass
class FeedFacts(InputFacts):
    """Facts of a run's data: all that a rank without batches, a server's, knows."""

    samples: int
    """Number of training samples, on all ranks together."""
    test_samples: int
    """Number of test samples, on all ranks together."""
    fingerprint: str
    """Fingerprint of the data, with which a resumed run checks that they are the same."""
    labels_per_sample: int = 1
    """Labels of a sample: 1, its class, or the tokens of a window of text, which are its channels."""
    notes: tuple[str, ...] = ()
    """Lines on what was chosen, for the start of a run."""

    def close(self) -> None:
        """Do nothing."""


class Feed(FeedFacts):
    """Batches for the ranks of a world. The order of an epoch depends on the seed and the shuffle, not on the ranks."""

    order: Numbers
    """Order of the samples in the epoch whose batches were asked for last."""

    def __init__(
        self,
        train: Reader,
        test: Reader,
        seed: int,
        fingerprint: str,
        *,
        shuffle: ShuffleOptions = ShuffleOptions(),  # noqa: B008  frozen
        held: int = 0,
        notes: tuple[str, ...] = (),
        observe: Observe | None = None,
    ) -> None:
        """Read batches from both sets. `held` is the number of samples that are this rank's own, if any are.

        `observe` is called with the span of each shuffle.
        """
        inputs, counts = (train.classes, train.channels, train.first), (train.samples, test.samples)
        self.facts = FeedFacts(*inputs, *counts, fingerprint, train.labels_per_sample, notes)
        """Facts alone, without batches."""
        super().__init__(**vars(self.facts))
        self._train, self._test, self._world, self._seed = train, test, train.sampler.world, seed
        self._shuffle, self._own, self._observe = shuffle, held, observe

    def share_among(self, virtual: int) -> None:
        """Give each rank the samples of its shares of so many virtual ranks (`reducer/virtual_ranks.py`)."""
        self._train.sampler.virtual = virtual

    def epoch(self, epoch: int, batch: int, done: int) -> Generator[Batch]:
        """Return this rank's share of an epoch from step `done` on. Collective; one epoch at a time."""
        with observed(self._observe, "shuffle", "shuffle"):
            order = self.order = self._train.sampler.order(self._seed, epoch, batch, self._shuffle)
            self._train.sampler.epoch(order, batch, done)
        seat = self._world.rank, self._world.size, self._train.sampler.virtual
        steps = range(done, steps_of(self.samples, batch))
        wanted = (share(order, batch, step, *seat) for step in steps)
        return self._train.batches(wanted, self._seed, epoch)

    def test_batches(self, batch: int, alone: bool = False) -> Iterator[Batch]:
        """Return this rank's share of the test set, in batches of at most ceil(batch / ranks) samples.

        If `alone`, return all of it on this rank, in batches of at most `batch`. Not collective.
        """
        return self._test.in_turn(batch, alone)

    def own_batches(self, batch: int, step: int) -> Iterator[Batch]:
        """Return batches of `batch` samples of this rank's own, without end, from step `step` on. Not collective."""
        assert self._own, "the feed is that of ranks out of step"

        def draw(epoch: int, done: int) -> Numbers:
            return self._train.sampler.own_epoch(self._seed, epoch, batch, done)

        drawn = own_numbers(draw, self._own, batch, step)
        worker = self._world.rank if self._own == self.samples else 0  # where all hold all, each changes them otherwise
        for epoch, several in groupby(drawn, key=lambda pair: pair[0]):
            yield from self._train.batches((numbers for _, numbers in several), self._seed, worker << 40 | epoch)

    def stop_threads(self) -> None:
        """Stop the threads: all that a rank does by itself if the others cannot be waited for."""
        self._train.stop()
        self._test.stop()

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self._train.close()
        self._test.close()


def packed_feed(
    options: DataOptions,
    world: World,
    seed: int,
    *,
    out_of_step: bool = False,
    device: torch.device = PROCESSOR,
    observe: Observe | None = None,
) -> Feed:
    """Read both packs into memory, and return their feed. Collective. Raises PackError on every rank.

    Ranks that are `out_of_step` draw and test by themselves: each node then has a copy of the test set. Batches are
    copied to `device`. `observe` is called with the spans of reading, decoding and shuffling.
    """
    check_installed()
    from unisono.data.pack.index import read_index  # noqa: PLC0415  of the extra `data`, as the next
    from unisono.data.storage.choose import resolve_storage  # noqa: PLC0415

    folder, shuffle, threads = Path(options.pack), parse_shuffle(options.shuffle), max(1, options.threads)
    train, test = world.call_on_all(
        lambda: [read_index(split_folder(folder, names)) for names in (TRAIN_SPLITS, TEST_SPLITS)]
    )
    fingerprint = f"{train.fingerprint}, {test.fingerprint}"
    check_on_all(folder, fingerprint, world)
    check_alike(train, test)
    transform = make_transform(train, options)
    place, reason = resolve_storage(options, train, world)
    if out_of_step and options.storage == AUTO:
        raise PackError(
            'data.storage = "auto", but ranks out of step own other samples in another storage, which a replay has '
            'to repeat: set "partitioned" or "replicated"'
        )
    if place.storage == STREAMED and shuffle != ShuffleOptions():
        raise PackError(
            f'data.shuffle = "{shuffle}", but {train.folder} is streamed, and nothing moves between ranks: '
            'set "epoch", or another data.storage'
        )
    with observed(observe, "read training set", "loading"):
        storage = read_storage(place, train, world)
    in_memory = REPLICATED if out_of_step else PARTITIONED
    test_place = replace(options, storage=FILES if options.storage == FILES else in_memory, groups=1)
    try:
        if storage.order_name:  # in the middle of an epoch, a resumed run needs the same order, as all ranks do
            fingerprint += f", {storage.order_name}"
            check_on_all(folder, fingerprint, world, "copy it again, or give all ranks one data.buffer")
        elif out_of_step:  # by which a rank's own samples are others
            fingerprint += f" {place.storage}"
        with observed(observe, "read test set", "loading"):
            test_storage = read_storage(test_place, test, world)
            test_storage.give_stretches()
    except PackError:  # on every rank
        storage.close()
        raise
    held = 0
    if out_of_step:
        with observed(observe, "shuffle", "shuffle"):
            held = len(storage.own(permutation(len(train), seed, 0)))
    loader = Prefetcher(train, storage, transform, threads, observe=observe, device=device)
    # both may decode at once: a worker reads ahead while it tests
    tester = Prefetcher(test, test_storage, transform, threads, f"test {DECODING}", observe, device)
    lines = ("storage", reason), ("storage", storage.note), ("shuffle", scope_note(shuffle, world.placement))
    notes = tuple(f"{subject}: {line}" for subject, line in lines if line)
    return Feed(loader, tester, seed, fingerprint, shuffle=shuffle, held=held, notes=notes, observe=observe)


def check_on_all(folder: Path, local: str, world: World, remedy: str = "copy it again") -> None:
    """Raise PackError unless all ranks read the same data, of which `local` is this rank's fingerprint. Collective."""
    for rank, fingerprint in enumerate(world.all_gather_object(local)):
        if fingerprint != local:
            raise PackError(f"{folder} is not the same on rank {rank} as on rank {world.rank}; {remedy}")


MAX_CLASSES_NAMED = 5


def check_alike(train: Index, test: Index) -> None:
    """Raise PackError unless a network that is trained on `train` can be tested on `test`: classes, kind, shape."""
    known, given = train.about, test.about
    if known.classes != given.classes:
        kind = find_kind(known.kind)
        ours, theirs = dict.fromkeys(known.classes), dict.fromkeys(given.classes)
        lacking, unknown = [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]
        differences = [f"it {verb} {_some(names)}" for verb, names in (("lacks", lacking), ("adds", unknown)) if names]
        raise PackError(
            f"{test.folder} has other {kind.class_words} than {train.folder}, the training set: "
            f"{'; '.join(differences) or 'the same in another order'}; {kind.class_remedy}"
        )
    if (known.kind, known.shape) != (given.kind, given.shape):
        raise PackError(
            f"{test.folder} holds {_form(test)}, but {train.folder}, the training set, {_form(train)}; pack both in "
            "the same way"
        )


def _some(names: list[str]) -> str:
    more = len(names) - MAX_CLASSES_NAMED
    return ", ".join(names[:MAX_CLASSES_NAMED]) + (f" and {more} more" if more > 0 else "")


def _form(index: Index) -> str:
    shape = index.about.shape
    return f"{index.about.kind} samples" + (f" of {' x '.join(map(str, shape))}" if shape else "")
