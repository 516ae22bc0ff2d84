"""Feed from two packs, a training set and a test set, in the memory of the ranks or read ahead from stripes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from unisono.data.feed import Feed, FeedFacts
from unisono.data.kinds import SampleTransform, TransformOptions, find_kind
from unisono.data.loading import DECODING, Prefetcher
from unisono.data.order import ShuffleOptions, permutation
from unisono.data.pack.index import Index, read_index
from unisono.data.pack.layout import TEST_SPLITS, TRAIN_SPLITS, split_folder
from unisono.data.storage import AUTO, STREAMED, StorageOptions, read_storage
from unisono.data.storage.choose import resolve_storage
from unisono.data.storage.ownership import form_groups, scope_note
from unisono.device import HOST
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
    device: torch.device = field(default_factory=lambda: torch.device(HOST))
    """Device that batches are copied to."""


def packed_feed(options: FeedOptions, world: World, seed: int, observe: Observe | None = None) -> Feed:
    """Read both packs into memory, and return their feed. Collective. Raises PackError on every rank.

    `observe` is called with the spans of reading, decoding and shuffling.
    """
    train, test = world.call_on_all(
        lambda: [read_index(split_folder(options.folder, names)) for names in (TRAIN_SPLITS, TEST_SPLITS)]
    )
    check_splits(train, test)
    fingerprint = f"{train.fingerprint}, {test.fingerprint}"
    check_alike(options.folder, fingerprint, world)
    transform = transform_of(train, options.transform)
    place, reason = resolve_storage(options.storage, train, world)
    _check_storage(options, place, train)
    with observed(observe, "read training set", "loading"):
        storage = read_storage(place, train, world)
    with observed(observe, "read test set", "loading"):
        test_storage = read_storage(StorageOptions("replicated" if options.out_of_step else "partitioned"), test, world)
    if storage.order_name:  # in the middle of an epoch, a resumed run needs the same order
        fingerprint += f", {storage.order_name}"
    own = 0
    if options.out_of_step:
        with observed(observe, "shuffle", "shuffle"):
            own = len(storage.own(permutation(len(train), seed, 0)))
    loader = Prefetcher(train, storage, transform, options.threads, observe=observe, device=options.device)
    # both may decode at once: a worker reads ahead while it tests
    tester = Prefetcher(test, test_storage, transform, options.threads, f"test {DECODING}", observe, options.device)
    copies = place.groups if place.name == "partitioned" else 1
    formed, crossing = form_groups(world.placement, copies).note, scope_note(options.shuffle, world.placement)
    lines = ("storage", reason), ("storage", formed), ("shuffle", crossing)
    facts = FeedFacts(
        samples=len(train),
        test_samples=len(test),
        classes=len(train.about.classes),
        channels=loader.shape[-1],
        first=loader.blank(1),
        fingerprint=fingerprint,
        labels_per_sample=find_kind(train.about.kind).labels_per_sample(train.about.shape),
        notes=tuple(f"{subject}: {line}" for subject, line in lines if line),
    )
    return Feed(facts, loader, tester, world, seed, shuffle=options.shuffle, own=own, observe=observe)


def _check_storage(options: FeedOptions, place: StorageOptions, train: Index) -> None:
    """Raise PackError if the storage of the training set does not take the other options."""
    if options.out_of_step and options.storage.name == AUTO:
        raise PackError(
            'data.storage = "auto", but ranks out of step own other samples in another storage, which a replay has '
            'to repeat: set "partitioned" or "replicated"'
        )
    if place.name == STREAMED and options.shuffle != ShuffleOptions():
        raise PackError(
            f'data.shuffle = "{options.shuffle}", but {train.folder} is streamed, and nothing moves between ranks: '
            'set "epoch", or another data.storage'
        )


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
