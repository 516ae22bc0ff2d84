"""Test set of a run, or of another pack with the same classes; each rank has its share, every sample once.

    run's pack/train     classes, mean and std, kind ─▶ the transform that the network was trained with
    any pack/test        samples ─ transform ─▶ inputs

A pack without test/ is taken as a whole: PACK/train evaluates the training set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from unisono.binding import CoreShare
from unisono.data.builtin import BUILTIN_DATASETS, Dataset
from unisono.data.feed import InputFacts
from unisono.data.kinds import find_kind
from unisono.data.loading import Batch, Prefetcher
from unisono.data.order import test_ranges
from unisono.data.pack.layout import INDEX, TEST_SPLITS, TRAIN_SPLITS, check_installed, split_folder
from unisono.errors import PackError, UsageError
from unisono.training.build import decoding_threads, transform_options
from unisono.training.recipe import Recipe
from unisono.world import World

if TYPE_CHECKING:
    from unisono.data.pack.index import Index

MAX_CLASSES_NAMED = 5
"""Number of differing classes that an error names."""


class TestSet(InputFacts, Protocol):
    """Labelled samples that the ranks of a world evaluate together."""

    title: str
    """Name of the data set or folder of the pack."""
    names: tuple[str, ...]
    """Names of the classes, or of the tokens of texts."""
    samples: int
    """Number of samples, on all ranks together."""
    labels_are_tokens: bool
    """True for texts, which have a label for each token."""
    labels_per_sample: int
    """Labels of a sample: 1, its class, or the tokens of a window of text."""
    bytes_per_label: int | None
    """Bytes of text that a label stands for; None where they differ, and for classes."""

    def batches(self, batch: int) -> Iterator[Batch]:
        """Return this rank's share, in batches of at most ceil(batch / ranks) samples."""
        ...

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        ...


class InMemoryTestSet:
    """Test set of a data set that comes with Unisono. Its classes have numbers for names."""

    def __init__(self, name: str, data: Dataset, world: World) -> None:
        self.title, self.names = name, tuple(map(str, range(data.classes)))
        self.samples, self.classes, self.channels = len(data.test), data.classes, data.test.inputs.shape[1]
        self.labels_are_tokens, self.labels_per_sample = False, 1
        self.bytes_per_label: int | None = None
        self._test, self._world = data.test, world

    def batches(self, batch: int) -> Iterator[Batch]:
        """Yield this rank's share."""
        for part in test_ranges(self.samples, batch, self._world.rank, self._world.size):
            rows = slice(part.start, part.stop)
            yield self._test.inputs[rows], self._test.labels[rows]

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return torch.zeros(samples, *self._test.inputs.shape[1:])

    def close(self) -> None:
        """Do nothing: there are no threads and no shared memory."""


class PackedTestSet:
    """Test set of a pack, read into the memory of the ranks."""

    def __init__(self, train: Index, test: Index, recipe: Recipe, threads: int, world: World) -> None:
        """Read `test`, for a network that was trained on `train`. Collective. Raises PackError on every rank."""
        from unisono.data.packed_feed import transform_of  # noqa: PLC0415  of the extra `data`
        from unisono.data.storage import StorageOptions, read_storage  # noqa: PLC0415

        self.title, self.names = str(test.folder), train.about.classes
        self.samples, self.classes, self._world = len(test), len(train.about.classes), world
        kind = find_kind(train.about.kind)
        self.labels_are_tokens = kind.labels_are_tokens
        self.labels_per_sample = kind.labels_per_sample(train.about.shape)
        self.bytes_per_label = kind.bytes_per_label(train.about.classes)
        storage = read_storage(StorageOptions("partitioned"), test, world)
        self._loader = Prefetcher(test, storage, transform_of(train, transform_options(recipe.data)), threads)
        self.channels = self._loader.shape[-1]

    def batches(self, batch: int) -> Iterator[Batch]:
        """Return this rank's share, decoded ahead by threads."""
        parts = test_ranges(self.samples, batch, self._world.rank, self._world.size)
        return self._loader.batches(np.array(part) for part in parts)

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return self._loader.blank(samples)

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self._loader.close()


def open_test_set(recipe: Recipe, pack: Path | None, world: World, share: CoreShare) -> TestSet:
    """Return the test set of the recipe's data, or of `pack`. Called by all ranks together.

    Raises PackError where a pack cannot be read, or its classes or samples are others than those of the run's;
    UsageError for a `pack` beside a run that was trained on no pack.
    """
    name, trained_on = recipe.data.name, recipe.data.pack
    if not trained_on:
        if pack is not None:
            raise UsageError(f"--pack {pack}: the run was trained on {name}, which is no pack; omit --pack")
        return InMemoryTestSet(name, BUILTIN_DATASETS[name](), world)
    check_installed()
    train, test = world.call_on_all(lambda: read_both(Path(trained_on), pack))
    return PackedTestSet(train, test, recipe, decoding_threads(recipe.data, share), world)


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
        lacking = _without(known.classes, given.classes)
        unknown = _without(given.classes, known.classes)
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


def _without(names: tuple[str, ...], others: tuple[str, ...]) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]


def _some(names: list[str]) -> str:
    more = len(names) - MAX_CLASSES_NAMED
    return ", ".join(names[:MAX_CLASSES_NAMED]) + (f" and {more} more" if more > 0 else "")


def _form(index: Index) -> str:
    shape = index.about.shape
    return f"{index.about.kind} samples" + (f" of {' x '.join(map(str, shape))}" if shape else "")
