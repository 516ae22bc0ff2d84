"""Mean and standard deviation of a pack's channels, from some of its images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from unisono.data.kinds import find_kind
from unisono.data.kinds.kind import Bytes, SampleKind
from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_stretch

MEASURED_IMAGES = 1_000
"""Approximate number of images that are measured, evenly spread over the pack."""

NEIGHBOURS = 10
"""Number of neighbouring samples that are read together."""


def statistics(index: Index) -> Index:
    """Return the index with mean and std of each channel: one channel if all images are grey, else three.

    An index of samples of a kind that has no pixels stays as it is.
    """
    if not len(index):
        return index
    kind = find_kind(index.about.kind)
    sums, squares, count = np.zeros(3), np.zeros(3), 0
    grey = True
    for sample in _some(index):
        pixels = kind.pixels(sample, index.about.shape)
        if pixels is None:
            return index
        flat = pixels.reshape(-1, pixels.shape[-1]) / 255.0
        grey = grey and flat.shape[1] == 1
        sums += flat.mean(axis=0)
        squares += (flat**2).mean(axis=0)
        count += 1
    mean = sums / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 1e-8))
    channels = slice(0, 1 if grey and _all_grey(index, kind) else 3)
    about = replace(index.about, mean=tuple(mean[channels].tolist()), std=tuple(std[channels].tolist()))
    return replace(index, about=about)


def _all_grey(index: Index, kind: SampleKind) -> bool:
    """Return True if all images are grey, as the measured ones are: by their headers, unless they have one shape."""
    return index.about.shape is not None or all(kind.is_grey(sample) for sample in _samples(index, 0, len(index)))


def _some(index: Index) -> Iterator[Bytes]:
    """Yield stretches of NEIGHBOURS samples, evenly spread over the pack."""
    apart = max(1, len(index) * NEIGHBOURS // MEASURED_IMAGES)
    for first in range(0, len(index), max(NEIGHBOURS, apart)):
        yield from _samples(index, first, min(len(index), first + NEIGHBOURS))


def _samples(index: Index, first: int, last: int) -> Iterator[Bytes]:
    for data, offsets in read_stretch(index, first, last):
        for begin, end in itertools.pairwise(offsets):
            yield data[begin:end]
