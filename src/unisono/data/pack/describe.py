"""Description of a pack in a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unisono.data.kinds import find_kind
from unisono.data.pack.index import Index, read_index
from unisono.data.pack.layout import INDEX
from unisono.errors import PackError

MAX_CLASSES_LISTED = 20
"""Number of classes that are listed one by one."""


def describe(folder: Path) -> Iterator[str]:
    """Yield lines about a pack, or about all packs in the subfolders of `folder`. Raises PackError if there is none."""
    parts = [folder] if (folder / INDEX).exists() else sorted(path.parent for path in folder.glob(f"*/{INDEX}"))
    if not parts:
        raise PackError(f"{folder} is no pack, and has none in its subfolders; create one with unisono pack")
    for part in parts:
        yield from _one(part)


def _one(folder: Path) -> Iterator[str]:
    index = read_index(folder)
    about, lengths = index.about, index.length
    what = about.kind if about.shape is None else f"{about.kind} {' x '.join(map(str, about.shape))}"
    yield f"{folder}: {len(index):,} samples ({what}), {index.nbytes / 1e6:,.1f} MB in {len(about.stripes)} stripes"
    yield f"  bytes of a sample   {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.0f}"
    if about.mean:
        each = ", ".join(f"{mean:.3f} ± {off:.3f}" for mean, off in zip(about.mean, about.std, strict=True))
        yield f"  channels            {each}"
    kind = find_kind(about.kind)
    labels = kind.labels_per_sample(about.shape)
    if labels > 1:
        yield f"  {kind.class_words:<20}{len(index) * labels:,} of a vocabulary of {len(about.classes):,}"
    else:
        yield from _classes(index)
    if about.skipped:
        yield f"  skipped             {len(about.skipped)}"
        yield from (f"    {key}: {why}" for key, why in about.skipped)


def _classes(index: Index) -> Iterator[str]:
    """Yield lines about the classes and their numbers of samples."""
    about = index.about
    counts = np.bincount(index.label, minlength=len(about.classes)).tolist()
    yield f"  classes             {len(about.classes)}"
    width = max((len(name) for name in about.classes[:MAX_CLASSES_LISTED]), default=0)
    for name, count in zip(about.classes[:MAX_CLASSES_LISTED], counts, strict=False):
        yield f"    {name:<{width}}  {count:>9,}"
    if len(about.classes) > MAX_CLASSES_LISTED:
        rest = counts[MAX_CLASSES_LISTED:]
        yield f"    and {len(rest)} more, with {min(rest):,} to {max(rest):,} samples"
