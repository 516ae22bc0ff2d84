"""Confusion of classes: the number of test samples of each class, by the class that the network guessed first.

    label   guess     counts    cat  dog
    cat     cat       cat         1    1     recall of cat: 1 of 2
    cat     dog       dog         0    2     recall of dog: 2 of 2
    dog     dog
    dog     dog       right: the diagonal, 3 of 4

Ranks count their own samples; the counts of all ranks are their sum, 8 c² bytes for c classes. As a picture, a row for
each class and a column for each first guess:

             guess
    class     cat   dog     recall
           ┌─────┬─────┐
      cat  │  93 │   7 │  93.0%     a cell's color is its share of the row; at the end of the row is its recall
           ├─────┼─────┤
      dog  │  12 │  88 │  88.0%
           └─────┴─────┘

With more than MAX_CLASSES classes, those with most mistakes have rows, in the order of the pack, and columns; a last
column has the guesses of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.training.accuracy import guesses
from unisono.view.heat_map import HeatCell, HeatMap

Counts = NDArray[np.int64]
"""Counts of samples, (classes, classes): by label, then by guess."""


class Mistake(NamedTuple):
    """Samples of one class whose first guess is another class, by the numbers of the classes."""

    label: int
    guess: int
    samples: int


def count_confusion(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return int64 counts of (label, guess), (classes, classes), to be summed over batches and ranks.

    `scores` is (samples, classes), `labels` is (samples,). The guess is that of `accuracy.count`.
    """
    classes = scores.shape[1]
    pairs = labels * classes + guesses(scores)[:, 0]
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def recalls(counts: Counts) -> list[float | None]:
    """Return the share of each class's samples that are guessed right, 0 to 1; None for a class without samples."""
    return [
        right / samples if samples else None
        for right, samples in zip(counts.diagonal().tolist(), counts.sum(axis=1).tolist(), strict=True)
    ]


def precisions(counts: Counts) -> list[float | None]:
    """Return the share of the guesses of each class that are right, 0 to 1; None for a class that is never guessed."""
    return recalls(counts.T)


def most_frequent_mistakes(counts: Counts, most: int) -> list[Mistake]:
    """Return the `most` most frequent mistakes, of equal ones those of the first classes first."""
    off = counts.copy()
    np.fill_diagonal(off, 0)
    order = np.argsort(-off, axis=None, kind="stable")[:most]
    rows, columns = np.unravel_index(order, off.shape)
    found = (Mistake(int(row), int(column), int(off[row, column])) for row, column in zip(rows, columns, strict=True))
    return [mistake for mistake in found if mistake.samples]


MAX_CLASSES = 30
"""Largest number of classes that are all drawn."""

MAX_NAME = 24
"""Largest number of characters of a name; longer ones are cut."""


def classes_drawn(counts: Counts) -> list[int]:
    """Return the classes that have rows and columns: all, or the MAX_CLASSES with most mistakes of or as them."""
    if len(counts) <= MAX_CLASSES:
        return list(range(len(counts)))
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
    return sorted(np.argsort(-wrong, kind="stable")[:MAX_CLASSES].tolist())


def confusion_map(counts: Counts, classes: Sequence[str]) -> HeatMap:
    """Return the picture of `counts`, (classes, classes), as data."""
    drawn, recall, note = classes_drawn(counts), recalls(counts), ""
    rows = [name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…" for name in (classes[one] for one in drawn)]
    totals, cells, columns = counts.sum(axis=1)[drawn], counts[np.ix_(drawn, drawn)], rows
    if len(drawn) < len(classes):
        cells, columns = np.column_stack([cells, totals - cells.sum(axis=1)]), [*rows, "others"]
        note = f"{len(drawn)} of {len(classes)} classes: those with most mistakes"
    return HeatMap(
        note,
        ("class", "guess"),
        rows,
        columns,
        [
            [HeatCell(str(samples), samples / total) if samples else HeatCell("") for samples in row]
            for row, total in zip(cells.tolist(), totals.tolist(), strict=True)
        ],
        ["–" if (share := recall[number]) is None else f"{share:.1%}" for number in drawn],
    )
