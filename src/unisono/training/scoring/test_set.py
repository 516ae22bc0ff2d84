"""Test set of a run, or of another pack with the same classes; each rank has its share, every sample once.

    run's pack/train     classes, mean and std, kind ─▶ the transform that the network was trained with
    any pack/test        samples ─ transform ─▶ inputs

A pack without test/ is taken as a whole: PACK/train evaluates the training set.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unisono.binding import CoreShare
from unisono.data.builtin import BUILTIN_DATASETS, RowReader
from unisono.data.kinds import make_transform
from unisono.data.loading import PROCESSOR, Prefetcher, Reader
from unisono.data.options import DataOptions
from unisono.data.pack.layout import INDEX, TEST_SPLITS, TRAIN_SPLITS, check_installed, split_folder
from unisono.errors import UsageError
from unisono.training.build import decoding_threads
from unisono.training.recipe import Recipe
from unisono.world import World

if TYPE_CHECKING:
    from unisono.data.pack.index import Index


def open_test_set(
    recipe: Recipe, pack: Path | None, world: World, share: CoreShare, device: torch.device = PROCESSOR
) -> Reader:
    """Return the test set of the recipe's data, or of `pack`, to be copied to a device. Called by all ranks together.

    Raises PackError where a pack cannot be read, or its classes or samples are others than those of the run's;
    UsageError for a `pack` beside a run that was trained on no pack.
    """
    name, trained_on = recipe.data.name, recipe.data.pack
    if not trained_on:
        if pack is not None:
            raise UsageError(f"--pack {pack}: the run was trained on {name}, which is no pack; omit --pack")
        data = BUILTIN_DATASETS[name]()
        return RowReader(data, data.test, world)
    check_installed()
    from unisono.data.storage import read_storage  # noqa: PLC0415  of the extra `data`

    train, test = world.call_on_all(lambda: read_both(Path(trained_on), pack))
    storage = read_storage(DataOptions(), test, world)
    transform = make_transform(train, recipe.data)
    return Prefetcher(test, storage, transform, decoding_threads(recipe.data, share), device=device)


def read_both(trained_on: Path, pack: Path | None) -> tuple[Index, Index]:
    """Return the indexes of the training set of a run, and of the test set to evaluate. Raises PackError."""
    from unisono.data.pack.index import read_index  # noqa: PLC0415  of the extra `data`
    from unisono.data.packed_feed import check_alike  # noqa: PLC0415

    train = read_index(split_folder(trained_on, TRAIN_SPLITS))
    other = trained_on if pack is None else pack
    test = read_index(other if (other / INDEX).is_file() else split_folder(other, TEST_SPLITS))
    check_alike(train, test)
    return train, test
