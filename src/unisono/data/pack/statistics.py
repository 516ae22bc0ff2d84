"""Mean and standard deviation of a pack's channels, from some of its images."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from PIL import Image

from unisono.data.images.decode import Pixels, decode_image, pixels_of
from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_stretch
from unisono.data.sources.source import AUDIO, IMAGE

MEASURED_IMAGES = 1_000
"""Approximate number of images that are measured, evenly spread over the pack."""

NEIGHBOURS = 10
"""Number of neighbouring samples that are read together."""

MIN_SIDE = 64
"""Pixels of the short side that are enough: larger JPEGs may be decoded smaller."""

GREY = {"L", "1", "I", "I;16"}


def statistics(index: Index) -> Index:
    """Return the index with mean and std of each channel: one channel if all images are grey, else three."""
    if index.about.kind == AUDIO or not len(index):
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
    std = np.sqrt(np.maximum(squares / count - mean**2, 1e-8))
    channels = slice(0, 1 if grey and _all_grey(index) else 3)
    about = replace(index.about, mean=tuple(mean[channels].tolist()), std=tuple(std[channels].tolist()))
    return replace(index, about=about)


def _all_grey(index: Index) -> bool:
    """Return True if all images are grey by their headers, as those that were measured are."""
    if index.about.kind != IMAGE:
        return True
    for data, offsets in read_stretch(index, 0, len(index)):
        for begin, end in itertools.pairwise(offsets):
            with Image.open(io.BytesIO(data[begin:end].tobytes())) as image:
                if image.mode not in GREY:
                    return False
    return True


def _some(index: Index) -> Iterator[Pixels]:
    apart = max(1, len(index) * NEIGHBOURS // MEASURED_IMAGES)
    for first in range(0, len(index), max(NEIGHBOURS, apart)):
        for data, offsets in read_stretch(index, first, min(len(index), first + NEIGHBOURS)):
            for begin, end in itertools.pairwise(offsets):
                sample = data[begin:end]
                if index.about.kind == IMAGE:
                    image = decode_image(sample.tobytes(), rotate=False, min_side=MIN_SIDE)
                    yield pixels_of(image, "L" if image.mode in GREY else "RGB")
                else:
                    assert index.about.shape is not None, "raw samples have a shape"
                    yield sample.reshape(*index.about.shape[:2], -1)
