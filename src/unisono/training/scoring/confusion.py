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
from unisono.training.sweep.heat_map import DARK_INK, GAP, LIGHT_INK, color_of
from unisono.training.sweep.svg import FONT_SIZE, LINE_HEIGHT, MARGIN, page, text, width_of

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

CELL_HEIGHT = 24.0
"""Height of a cell, in SVG units."""

MAX_NAME = 24
"""Largest number of characters of a name; longer ones are cut."""


def classes_drawn(counts: Counts) -> list[int]:
    """Return the classes that have rows and columns: all, or the MAX_CLASSES with most mistakes of or as them."""
    if len(counts) <= MAX_CLASSES:
        return list(range(len(counts)))
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
    return sorted(np.argsort(-wrong, kind="stable")[:MAX_CLASSES].tolist())


def draw_confusion(counts: Counts, classes: Sequence[str], title: str) -> str:
    """Return the picture of `counts`, (classes, classes), as an SVG document."""
    drawn = classes_drawn(counts)
    names, recall = [_cut(classes[number]) for number in drawn], recalls(counts)
    cells = counts[np.ix_(drawn, drawn)]
    totals = counts.sum(axis=1)[drawn]
    if len(drawn) < len(classes):
        names.append("others")
        cells = np.column_stack([cells, totals - cells.sum(axis=1)])
    left = MARGIN + max(width_of("class"), *map(width_of, names[: len(drawn)])) + GAP
    width = max(width_of(str(int(cells.max(initial=0)))) + GAP, FONT_SIZE + GAP)
    longest = max(map(width_of, names))
    level = longest <= width  # else names are read upwards
    top = MARGIN + FONT_SIZE + 2 * LINE_HEIGHT + (LINE_HEIGHT if level else longest) + GAP
    body = [text(left, MARGIN + FONT_SIZE + 1.5 * LINE_HEIGHT, "guess"), text(MARGIN, top - GAP, "class")]
    for column, name in enumerate(names):
        x = left + width * (column + 0.5)
        body.append(text(x, top - GAP, name, "middle") if level else _upwards(x + FONT_SIZE / 3, top - GAP, name))
    body.append(text(left + width * len(names) + GAP, top - GAP, "recall"))
    for row, number in enumerate(drawn):
        y = top + CELL_HEIGHT * row
        body.append(text(left - GAP, y + CELL_HEIGHT / 2 + 4, names[row], "end"))
        for column, samples in enumerate(cells[row].tolist()):
            body += _cell(left + width * column, y, width, samples, samples / max(1, int(totals[row])))
        share = recall[number]
        body.append(
            text(left + width * len(names) + GAP, y + CELL_HEIGHT / 2 + 4, "–" if share is None else f"{share:.1%}")
        )
    right = left + width * len(names) + GAP + width_of("100.0%")
    bottom = top + CELL_HEIGHT * len(drawn) + MARGIN
    if len(drawn) < len(classes):
        note = f"{len(drawn)} of {len(classes)} classes: those with most mistakes"
        body.append(text(MARGIN, bottom, note))
        right, bottom = max(right, MARGIN + width_of(note)), bottom + MARGIN
    return page(max(right, MARGIN + width_of(title)) + MARGIN, bottom, title, body)


def _cell(x: float, y: float, width: float, samples: int, share: float) -> list[str]:
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{CELL_HEIGHT - 1:.1f}"'
    if not samples:
        return [f'{box} class="empty"/>']
    ink = LIGHT_INK if share > 0.75 else DARK_INK
    words = text(x + width / 2, y + CELL_HEIGHT / 2 + 4, str(samples), "middle", f'fill="{ink}"')
    return [f'{box} fill="{color_of(share)}"/>', words]


def _upwards(x: float, y: float, words: str) -> str:
    return text(x, y, words, attributes=f'transform="rotate(-90 {x:.1f} {y:.1f})"')


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
