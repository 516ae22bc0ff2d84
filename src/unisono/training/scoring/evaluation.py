"""Evaluation of a checkpoint: its measures as data for JSON, as rows of a table, and the confusion of its classes.

a label a sample       accuracy, recall and precision of each class, confusion
a label each token     perplexity, bits per byte

Of texts, the token after each input token is what the network has to guess:

    label                    a      b      c      d
    probability of it       1/2    1/4    1/8    1/4
    cross entropy, bits      1      2      3      2      mean 2 bits: loss 2 ln 2 = 1.386, perplexity 2^2 = 4

Perplexity is the exponential of the loss: guesses among so many tokens of one probability are as good. Losses per token
cannot be compared between tokenizers; bits per byte can, and are known where each token is a byte.

Confusion is the number of test samples of each class, by the class that the network guessed first:

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

Forward passes alone are timed at batch sizes 1, 2, 4, ... 256 (PCL-DNN, figure 3: scoring):

    batch     forward on zeros: untimed ─ timed ─ timed ─ ...       median of the timed ones
    1         ▏3 ms, ▏1 ms, ▏1 ms, ... until TIMED_SECONDS          1 ms: 1,000 samples/s
    256       ▏190 ms, ▏180 ms, ▏170 ms, ▏180 ms                    180 ms: 1,422 samples/s

A small batch has too few products to fill the cores; a large one has more activations than their caches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.training.accuracy import Accuracy, guesses
from unisono.training.measures import finite
from unisono.view.chart import no_pictures
from unisono.view.heat_map import HeatCell, HeatMap, draw_heat_maps

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

TIMED_SECONDS = 0.5
"""Seconds after which no further pass of a batch size is timed."""

MIN_PASSES, MAX_PASSES = 3, 100
"""Fewest and most passes that are timed of a batch size."""

CONFUSION = "confusion.svg"
"""File of the picture."""

MISTAKES_SHOWN = 3
"""Number of mistakes in the table."""

MAX_CLASSES = 30
"""Largest number of classes that are all drawn."""

MAX_MATRIX = 2_000
"""Largest number of classes whose confusion is data as a whole; of more, as the cells that are not 0."""

MAX_NAME = 24
"""Largest number of characters of a name in the picture; longer ones are cut."""

Counts = NDArray[np.int64]
"""Counts of samples, (classes, classes): by label, then by guess."""


class BatchThroughput(NamedTuple):
    """Throughput at one batch size."""

    batch: int
    seconds: float
    """Median time of a forward pass."""
    samples_per_second: float
    passes: int
    """Timed passes."""


def measure_throughput(
    forward: Callable[[Tensor], object],
    blank: Callable[[int], Tensor],
    sizes: Sequence[int] = BATCH_SIZES,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[BatchThroughput]:
    """Yield the throughput of `forward` at each batch size; `blank` returns the inputs of so many samples.

    The first pass of a size is not timed: it allocates memory and creates the library's plans.
    """
    for batch in sizes:
        inputs, seconds = blank(batch), list[float]()
        forward(inputs)
        while len(seconds) < MIN_PASSES or (sum(seconds) < TIMED_SECONDS and len(seconds) < MAX_PASSES):
            begun = clock()
            forward(inputs)
            seconds.append(clock() - begun)
        median = statistics.median(seconds)
        yield BatchThroughput(batch, median, batch / median, len(seconds))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measures of a network on a test set: of samples that have a class each, or of windows of text."""

    samples: int
    """Number of test samples."""
    accuracy: Accuracy
    """Accuracy and loss of all labels."""
    classes: tuple[str, ...] = ()
    confusion: Counts | None = None
    """Samples by label and first guess; None for texts."""
    tokens_per_sample: int = 1
    """Labels of a window of text."""
    bytes_per_token: int | None = None
    """Bytes of text that a token stands for; None where they differ."""
    throughput: Sequence[BatchThroughput] = ()
    """Forward passes on one rank, by batch size; empty if they were not measured."""

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that a byte of text takes; None where tokens stand for unlike numbers of bytes."""
        known = self.bytes_per_token
        return None if known is None else self.accuracy.loss / math.log(2) / known

    @property
    def speed_unit(self) -> str:
        return "tokens/s" if self.confusion is None else "samples/s"

    def speed(self, entry: BatchThroughput) -> float:
        """Return the throughput at a batch size in `speed_unit`."""
        return entry.samples_per_second * self.tokens_per_sample

    def as_data(self) -> dict[str, Any]:
        """Return the evaluation as data for JSON; measures that are not finite, and shares of nothing, are None."""
        accuracy, counts = self.accuracy, self.confusion
        data: dict[str, Any] = {"samples": self.samples, "loss": finite(accuracy.loss)}
        data |= {"top1": accuracy.top1, "top5": accuracy.top5}
        speeds = [entry._asdict() for entry in self.throughput]
        if counts is None:
            data |= {"tokens": self.samples * self.tokens_per_sample, "perplexity": finite(accuracy.perplexity)}
            data |= {"bits_per_byte": finite(self.bits_per_byte)}
            speeds = [{**entry._asdict(), "tokens_per_second": self.speed(entry)} for entry in self.throughput]
            return {**data, "throughput": speeds}
        rows = zip(self.classes, counts.sum(axis=1).tolist(), recalls(counts), recalls(counts.T), strict=True)
        names = "class", "samples", "recall", "precision"
        classes = [dict(zip(names, row, strict=True)) for row in rows]
        whole = len(counts) <= MAX_MATRIX
        confusion = {"confusion": counts.tolist()} if whole else {"confusion_cells": cells_of(counts)}
        return {**data, "classes": classes, **confusion, "throughput": speeds}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the table: a name, and its value in words."""
        accuracy, counts = self.accuracy, self.confusion
        yield "samples", f"{self.samples:,}"
        if counts is None:
            yield "tokens", f"{self.samples * self.tokens_per_sample:,}"
            yield "loss per token", f"{accuracy.loss:.4f}"
            yield "perplexity", f"{accuracy.perplexity:.2f}"
            if self.bits_per_byte is not None:
                yield "bits per byte", f"{self.bits_per_byte:.4f}"
            yield "token accuracy", f"{accuracy.top1:.2%}"
            if accuracy.top5 is not None:
                yield "token accuracy, top-5", f"{accuracy.top5:.2%}"
            return
        yield "loss", f"{accuracy.loss:.4f}"
        yield "top-1 accuracy", f"{accuracy.top1:.2%}"
        if accuracy.top5 is not None:
            yield "top-5 accuracy", f"{accuracy.top5:.2%}"
        shares = zip(recalls(counts), self.classes, strict=True)
        lowest, name = min(((share, name) for share, name in shares if share is not None), key=lambda pair: pair[0])
        yield "lowest recall", f"{name}: {lowest:.2%}"
        for label, guess, samples in most_frequent_mistakes(counts, MISTAKES_SHOWN):
            yield "mistake", f"{self.classes[label]} as {self.classes[guess]}: {samples:,}"

    @property
    def remark(self) -> str:
        """Words on why there is no picture; empty where there is one."""
        return "tokens have no picture of their confusion" if self.confusion is None else no_pictures()

    def images(self, title: str) -> Mapping[str, bytes]:
        """Return pictures by file name; `title` has the run and its data."""
        if self.confusion is None or self.remark:
            return {}
        drawn = confusion_map(self.confusion, self.classes)
        return {CONFUSION: draw_heat_maps([drawn], f"{title}: top-1 {self.accuracy.top1:.2%}, recall at the right")}


# Confusion -----------------------------------------------------------------------------------------------------------


def count_confusion(confusion: Tensor, scores: Tensor, labels: Tensor) -> None:
    """Add a batch to int64 counts of (label, guess), (classes, classes), which are then summed over ranks.

    `scores` is (samples, classes), `labels` is (samples,). The guess is that of `accuracy.count`.
    """
    pairs = labels * scores.shape[1] + guesses(scores)[:, 0]
    confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs))


def recalls(counts: Counts) -> list[float | None]:
    """Return the share of each class's samples that are guessed right, 0 to 1; None for a class without samples.

    Of the transposed counts, the shares of the guesses of each class that are right: the precisions.
    """
    pairs = zip(counts.diagonal().tolist(), counts.sum(axis=1).tolist(), strict=True)
    return [right / samples if samples else None for right, samples in pairs]


def cells_of(counts: Counts) -> list[tuple[int, int, int]]:
    """Return label, guess and number of samples of each pair that occurs, in order."""
    labels, guessed = np.nonzero(counts)
    return list(zip(labels.tolist(), guessed.tolist(), counts[labels, guessed].tolist(), strict=True))


def most_frequent_mistakes(counts: Counts, most: int) -> list[tuple[int, int, int]]:
    """Return label, guess and number of samples of the `most` most frequent mistakes, of equal ones those of the first
    classes first."""
    mistakes = [cell for cell in cells_of(counts) if cell[0] != cell[1]]
    return sorted(mistakes, key=lambda cell: -cell[2])[:most]


def classes_drawn(counts: Counts) -> list[int]:
    """Return the classes that have rows and columns: all, or the MAX_CLASSES with most mistakes of or as them."""
    if len(counts) <= MAX_CLASSES:
        return list(range(len(counts)))
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
    return sorted(np.argsort(-wrong, kind="stable")[:MAX_CLASSES].tolist())


def confusion_map(counts: Counts, classes: Sequence[str]) -> HeatMap:
    """Return the picture of `counts`, (classes, classes), as data."""
    drawn, note = classes_drawn(counts), ""
    names = [classes[index] for index in drawn]
    rows = [name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…" for name in names]
    totals, samples, columns = counts.sum(axis=1)[drawn], counts[np.ix_(drawn, drawn)], rows
    if len(drawn) < len(classes):
        samples, columns = np.column_stack([samples, totals - samples.sum(axis=1)]), [*rows, "others"]
        note = f"{len(drawn)} of {len(classes)} classes: those with most mistakes"
    cells = [
        [HeatCell(str(count), count / total) if count else HeatCell("") for count in row]
        for row, total in zip(samples.tolist(), totals.tolist(), strict=True)
    ]
    shares = [recalls(counts)[index] for index in drawn]
    ends = ["–" if share is None else f"{share:.1%}" for share in shares]
    return HeatMap(note, ("class", "guess"), rows, columns, cells, ends)
