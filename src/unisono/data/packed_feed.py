"""Feed from two packs, a training set and a test set, in the memory of the ranks or read from files or stripes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from unisono.data.feed import Feed
from unisono.data.kinds import find_kind, make_transform
from unisono.data.loading import DECODING, PROCESSOR, Prefetcher
from unisono.data.options import DataOptions
from unisono.data.order import ShuffleOptions, parse_shuffle, permutation
from unisono.data.pack import TEST_SPLITS, TRAIN_SPLITS, split_folder
from unisono.data.pack.index import Index, read_index
from unisono.data.storage import AUTO, FILES, PARTITIONED, REPLICATED, STREAMED, read_storage
from unisono.data.storage.choose import resolve_storage
from unisono.data.storage.partitioned import scope_note
from unisono.engine import Observe, observed
from unisono.errors import PackError
from unisono.world import World


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
    folder, shuffle, threads = Path(options.pack), parse_shuffle(options.shuffle), max(1, options.threads)
    train, test = world.call_on_all(
        lambda: [read_index(split_folder(folder, names)) for names in (TRAIN_SPLITS, TEST_SPLITS)]
    )
    check_alike(train, test)
    fingerprint = f"{train.fingerprint}, {test.fingerprint}"
    check_on_all(folder, fingerprint, world)
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
        with observed(observe, "read test set", "loading"):
            test_storage = read_storage(test_place, test, world)
            test_storage.give_stretches()
    except PackError:  # on every rank
        storage.close()
        raise
    if storage.order_name:  # in the middle of an epoch, a resumed run needs the same order
        fingerprint += f", {storage.order_name}"
    own = 0
    if out_of_step:
        with observed(observe, "shuffle", "shuffle"):
            own = len(storage.own(permutation(len(train), seed, 0)))
    loader = Prefetcher(train, storage, transform, threads, observe=observe, device=device)
    # both may decode at once: a worker reads ahead while it tests
    tester = Prefetcher(test, test_storage, transform, threads, f"test {DECODING}", observe, device)
    lines = ("storage", reason), ("storage", storage.note), ("shuffle", scope_note(shuffle, world.placement))
    notes = tuple(f"{subject}: {line}" for subject, line in lines if line)
    return Feed(loader, tester, seed, fingerprint, shuffle=shuffle, own=own, notes=notes, observe=observe)


def check_on_all(folder: Path, own: str, world: World) -> None:
    """Raise PackError unless all ranks read the same data, of which `own` is this rank's fingerprint. Collective."""
    for rank, fingerprint in enumerate(world.all_gather_object(own)):
        if fingerprint != own:
            raise PackError(f"{folder} is not the same on rank {rank} as on rank {world.rank}; copy it again")


MAX_CLASSES_NAMED = 5
"""Number of differing classes that an error names."""


def check_alike(train: Index, test: Index) -> None:
    """Raise PackError unless a network that is trained on `train` can be tested on `test`: classes, kind, shape."""
    known, given = train.about, test.about
    if known.classes != given.classes:
        kind = find_kind(known.kind)
        lacking, unknown = (
            [name for name in some if name not in set(others)]
            for some, others in ((known.classes, given.classes), (given.classes, known.classes))
        )
        words = [f"it {verb} {_some(names)}" for verb, names in (("lacks", lacking), ("adds", unknown)) if names]
        raise PackError(
            f"{test.folder} has other {kind.class_words} than {train.folder}, the training set: "
            f"{'; '.join(words) or 'the same in another order'}; {kind.class_remedy}"
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
