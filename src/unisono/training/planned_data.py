"""Data of a planned run, from its recipe: samples, and what they cost to load.

recipe ┬ data.name ─▶ data set that comes with Unisono: already decoded
       └ data.pack ─▶ index: samples, bytes, classes ─▶ headers of the first images: pixels
                      not on this machine: nothing is known
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unisono.data.builtin import BUILTIN_DATASETS
from unisono.data.kinds import IMAGE, find_kind
from unisono.data.pack.layout import TEST_SPLITS, TRAIN_SPLITS, check_installed, split_folder
from unisono.data.storage import STREAMED
from unisono.errors import RecipeError
from unisono.plan.loading import MAX_DECODING_THREADS, SampleFacts
from unisono.training.recipe import DataRecipe

if TYPE_CHECKING:
    from unisono.data.pack.index import Index

MAX_HEADERS_READ = 64
"""Number of images whose headers are read for the mean number of pixels."""


class PlannedData(NamedTuple):
    """Data of a run, as far as they are known before it starts."""

    samples: SampleFacts = SampleFacts()
    train: int | None = None
    """Number of training samples; None: not known."""
    test: int = 0
    classes: int | None = None
    shape: tuple[int, ...] | None = None
    """Shape of a sample of text, (tokens,); None: given by the network or by an option."""


def data_of(recipe: DataRecipe) -> PlannedData:
    """Return the data of a recipe; without a name, or of a pack that is not here, their form in memory alone.

    Raises RecipeError for an unknown data set, and PackError for a pack that cannot be read.
    """
    facts = SampleFacts(
        threads=recipe.threads or MAX_DECODING_THREADS,
        from_disk=recipe.storage == STREAMED,
        copies=0 if recipe.storage == "replicated" else recipe.groups,
    )
    if not recipe.pack:
        if not recipe.name:
            return PlannedData(facts)
        if recipe.name not in BUILTIN_DATASETS:
            raise RecipeError(f"data.name = {recipe.name!r}; there are {', '.join(BUILTIN_DATASETS)}")
        data = BUILTIN_DATASETS[recipe.name]()
        return PlannedData(facts, len(data.train), len(data.test), data.classes)
    folder = Path(recipe.pack)
    if not folder.is_dir():
        return PlannedData(facts)
    check_installed()
    from unisono.data.pack.index import read_index  # noqa: PLC0415  Arrow takes a while, and only packs need it

    train, test = (read_index(split_folder(folder, names)) for names in (TRAIN_SPLITS, TEST_SPLITS))
    facts = facts._replace(nbytes=train.nbytes / len(train), pixels=mean_pixels(train))
    labels = find_kind(train.about.kind).labels_per_sample(train.about.shape)
    return PlannedData(facts, len(train), len(test), len(train.about.classes), (labels,) if labels > 1 else None)


def mean_pixels(index: Index) -> float:
    """Return the pixels of an image in a pack, the mean of its first ones; 0 for raw samples and recordings."""
    if index.about.kind != IMAGE:
        return 0.0
    from PIL import Image  # noqa: PLC0415  only packs of images need it

    from unisono.data.pack.stripe_file import read_stretch  # noqa: PLC0415  Arrow takes a while

    found = list[int]()
    for stretch in read_stretch(index, 0, min(MAX_HEADERS_READ, len(index))):
        for first, last in zip(stretch.offsets[:-1], stretch.offsets[1:], strict=True):
            with Image.open(io.BytesIO(stretch.data[first:last].tobytes())) as image:
                found.append(image.width * image.height)
    return sum(found) / len(found)
