"""Mean and standard deviation of a pack's channels, from some of its images."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from PIL import Image

from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_stretch
from unisono.data.pictures.picture import Pixels, pixels_of, read_any
from unisono.data.sources.source import PICTURE, SOUND

PICTURES = 1_000
"""Approximate number of images that are measured, evenly spread over the pack."""

STRETCH = 10
"""Number of neighbouring samples that are read together."""

SMALL = 64
"""Pixels of the short side that are enough: larger JPEGs may be decoded smaller."""

GREY = {"L", "1", "I", "I;16"}


def statistics(index: Index) -> Index:
    """Return the index with mean and deviation of each channel: one if all images of the pack are grey, else three."""
    if index.about.kind == SOUND or not len(index):
        return index
    sums, squares, count = np.zeros(3), np.zeros(3), 0
    grey = True
    for pixels in _some(index):
        flat = pixels.reshape(-1, pixels.shape[-1]) / 255.0
        grey = grey and flat.shape[1] == 1
        sums += flat.mean(axis=0)
        squares += (flat**2).mean(axis=0)
        count += 1
    mean = sums / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 1e-8))
    colors = slice(0, 1 if grey and _all_grey(index) else 3)
    about = replace(index.about, mean=tuple(mean[colors].tolist()), deviation=tuple(deviation[colors].tolist()))
    return replace(index, about=about)


def _all_grey(index: Index) -> bool:
    """Return True if all images are grey by their headers, as those that were measured are."""
    if index.about.kind != PICTURE:
        return True
    for data, offsets in read_stretch(index, 0, len(index)):
        for begin, end in itertools.pairwise(offsets):
            with Image.open(io.BytesIO(data[begin:end].tobytes())) as picture:
                if picture.mode not in GREY:
                    return False
    return True


def _some(index: Index) -> Iterator[Pixels]:
    apart = max(1, len(index) * STRETCH // PICTURES)
    for first in range(0, len(index), max(STRETCH, apart)):
        for data, offsets in read_stretch(index, first, min(len(index), first + STRETCH)):
            for begin, end in itertools.pairwise(offsets):
                sample = data[begin:end]
                if index.about.kind == PICTURE:
                    picture = read_any(sample.tobytes(), turn=False, enough=SMALL)
                    yield pixels_of(picture, "L" if picture.mode in GREY else "RGB")
                else:
                    assert index.about.shape is not None, "raw samples have a shape"
                    yield sample.reshape(*index.about.shape[:2], -1)
