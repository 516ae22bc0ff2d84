"""Test set of a run, or of another pack with the same classes; each rank has its share, every sample once.

    run's pack/train     classes, mean and std, kind ─▶ the transform that the network was trained with
    any pack/test        samples ─ transform ─▶ inputs

A pack without test/ is taken as a whole: PACK/train evaluates the training set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from unisono.binding import CoreShare
from unisono.data.builtin import BUILTIN_DATASETS, RowReader
from unisono.data.kinds import find_kind
from unisono.data.loading import Batch, Prefetcher, Reader
from unisono.data.order import test_ranges
from unisono.data.pack.layout import INDEX, TEST_SPLITS, TRAIN_SPLITS, check_installed, split_folder
from unisono.errors import PackError, UsageError
from unisono.training.build import PROCESSOR, decoding_threads, transform_options
from unisono.training.recipe import Recipe
from unisono.world import World

if TYPE_CHECKING:
    from unisono.data.pack.index import Index

MAX_CLASSES_NAMED = 5
"""Number of differing classes that an error names."""


@dataclass
class TestSet:
    """Labelled samples that the ranks of a world evaluate together."""

    title: str
    """Name of the data set or folder of the pack."""
    names: tuple[str, ...]
    """Names of the classes, or of the tokens of texts."""
    channels: int
    samples: int
    """Number of samples, on all ranks together."""
    reader: Reader
    world: World
    labels_are_tokens: bool = False
    """True for texts, which have a label for each token."""
    labels_per_sample: int = 1
    """Labels of a sample: 1, its class, or the tokens of a window of text."""
    bytes_per_label: int | None = None
    """Bytes of text that a label stands for; None where they differ, and for classes."""

    def __post_init__(self) -> None:
        self.classes = len(self.names)

    def batches(self, batch: int) -> Iterator[Batch]:
        """Return this rank's share, in batches of at most ceil(batch / ranks) samples."""
        parts = test_ranges(self.samples, batch, self.world.rank, self.world.size)
        return self.reader.batches(np.array(part) for part in parts)

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return self.reader.blank(samples)

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self.reader.close()


def open_test_set(
    recipe: Recipe, pack: Path | None, world: World, share: CoreShare, device: torch.device = PROCESSOR
) -> TestSet:
    """Return the test set of the recipe's data, or of `pack`, to be copied to a device. Called by all ranks together.

    Raises PackError where a pack cannot be read, or its classes or samples are others than those of the run's;
    UsageError for a `pack` beside a run that was trained on no pack.
    """
    name, trained_on = recipe.data.name, recipe.data.pack
    if not trained_on:
        if pack is not None:
            raise UsageError(f"--pack {pack}: the run was trained on {name}, which is no pack; omit --pack")
        data = BUILTIN_DATASETS[name]()
        names, channels = tuple(map(str, range(data.classes))), data.test.inputs.shape[1]
        return TestSet(name, names, channels, len(data.test), RowReader(data.test, world, None), world)
    check_installed()
    from unisono.data.packed_feed import transform_of  # noqa: PLC0415  of the extra `data`
    from unisono.data.storage import StorageOptions, read_storage  # noqa: PLC0415

    train, test = world.call_on_all(lambda: read_both(Path(trained_on), pack))
    about, threads = train.about, decoding_threads(recipe.data, share)
    storage = read_storage(StorageOptions("partitioned"), test, world)
    transform = transform_of(train, transform_options(recipe.data))
    reader = Prefetcher(test, storage, transform, threads, device=device)
    kind = find_kind(about.kind)
    labels = kind.labels_are_tokens, kind.labels_per_sample(about.shape), kind.bytes_per_label(about.classes)
    return TestSet(str(test.folder), about.classes, reader.shape[-1], len(test), reader, world, *labels)


def read_both(trained_on: Path, pack: Path | None) -> tuple[Index, Index]:
    """Return the indexes of the training set of a run, and of the test set to evaluate. Raises PackError."""
    from unisono.data.pack.index import read_index  # noqa: PLC0415  of the extra `data`

    train = read_index(split_folder(trained_on, TRAIN_SPLITS))
    other = trained_on if pack is None else pack
    test = read_index(other if (other / INDEX).is_file() else split_folder(other, TEST_SPLITS))
    check_alike(train, test)
    return train, test


def check_alike(train: Index, test: Index) -> None:
    """Raise PackError unless a network that was trained on `train` can be evaluated on `test`: classes, kind, shape."""
    known, given = train.about, test.about
    if known.classes != given.classes:
        kind = find_kind(known.kind)
        here, there = set(known.classes), set(given.classes)
        lacking = [name for name in known.classes if name not in there]
        unknown = [name for name in given.classes if name not in here]
        words = [
            *([f"it lacks {_some(lacking)}"] if lacking else []),
            *([f"the run does not know {_some(unknown)}"] if unknown else []),
        ]
        raise PackError(
            f"{test.folder} has other {kind.class_words} than {train.folder}, which the run was trained on: "
            f"{'; '.join(words) or 'the same in another order'}; {kind.class_remedy}"
        )
    if (known.kind, known.shape) != (given.kind, given.shape):
        raise PackError(
            f"{test.folder} holds {_form(test)}, but the run was trained on {_form(train)} in {train.folder}; pack "
            "both in the same way"
        )


def _some(names: list[str]) -> str:
    more = len(names) - MAX_CLASSES_NAMED
    return ", ".join(names[:MAX_CLASSES_NAMED]) + (f" and {more} more" if more > 0 else "")


def _form(index: Index) -> str:
    shape = index.about.shape
    return f"{index.about.kind} samples" + (f" of {' x '.join(map(str, shape))}" if shape else "")
