"""Evaluation of a checkpoint: its measures as data for JSON, and as rows of a table.

a label a sample       accuracy, recall and precision of each class, confusion
a label each token     perplexity, bits per byte

Of texts, the token after each input token is what the network has to guess:

    label                    a      b      c      d
    probability of it       1/2    1/4    1/8    1/4
    cross entropy, bits      1      2      3      2      mean 2 bits: loss 2 ln 2 = 1.386, perplexity 2^2 = 4

Perplexity is the exponential of the loss: guesses among so many tokens of one probability are as good. Losses per token
cannot be compared between tokenizers; bits per byte can, and are known where each token is a byte.

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

from torch import Tensor

from unisono.training.accuracy import Accuracy
from unisono.training.scoring.confusion import Counts, confusion_map, most_frequent_mistakes, precisions, recalls
from unisono.view.chart import no_pictures
from unisono.view.heat_map import draw_heat_maps

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

TIMED_SECONDS = 0.5
"""Seconds after which no further pass of a batch size is timed."""

MIN_PASSES, MAX_PASSES = 3, 100
"""Fewest and most passes that are timed of a batch size."""

CONFUSION = "confusion.svg"
"""File of the picture."""

MISTAKES_SHOWN = 3
"""Number of mistakes in the table."""


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
    def tokens(self) -> int:
        """Number of labels of a text."""
        return self.samples * self.tokens_per_sample

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that a byte of text takes; None where tokens stand for unlike numbers of bytes."""
        known = self.bytes_per_token
        return None if known is None else self.accuracy.loss / math.log(2) / known

    @property
    def speed_unit(self) -> str:
        """Unit of `speed`."""
        return "tokens/s" if self.confusion is None else "samples/s"

    def speed(self, entry: BatchThroughput) -> float:
        """Return the throughput at a batch size in `speed_unit`."""
        return entry.samples_per_second * self.tokens_per_sample

    def as_data(self) -> dict[str, Any]:
        """Return the evaluation as data for JSON; measures that are not finite, and shares of nothing, are None."""
        text = self.confusion is None
        return {
            "samples": self.samples,
            "loss": finite(self.accuracy.loss),
            "top1": self.accuracy.top1,
            "top5": self.accuracy.top5,
            **(self._text_data() if self.confusion is None else self._class_data(self.confusion)),
            "throughput": [
                entry._asdict() | ({"tokens_per_second": self.speed(entry)} if text else {})
                for entry in self.throughput
            ],
        }

    def _text_data(self) -> dict[str, Any]:
        perplexity = finite(self.accuracy.perplexity)
        return {"tokens": self.tokens, "perplexity": perplexity, "bits_per_byte": finite(self.bits_per_byte)}

    def _class_data(self, counts: Counts) -> dict[str, Any]:
        each = zip(self.classes, counts.sum(axis=1).tolist(), recalls(counts), precisions(counts), strict=True)
        names = "class", "samples", "recall", "precision"
        return {"classes": [dict(zip(names, one, strict=True)) for one in each], "confusion": counts.tolist()}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the table: a name, and its value in words."""
        yield "samples", f"{self.samples:,}"
        yield from self._text_rows() if self.confusion is None else self._class_rows(self.confusion)

    def _text_rows(self) -> Iterator[tuple[str, str]]:
        yield "tokens", f"{self.tokens:,}"
        yield "loss per token", f"{self.accuracy.loss:.4f}"
        yield "perplexity", f"{self.accuracy.perplexity:.2f}"
        if self.bits_per_byte is not None:
            yield "bits per byte", f"{self.bits_per_byte:.4f}"
        yield "token accuracy", f"{self.accuracy.top1:.2%}"
        if self.accuracy.top5 is not None:
            yield "token accuracy, top-5", f"{self.accuracy.top5:.2%}"

    def _class_rows(self, counts: Counts) -> Iterator[tuple[str, str]]:
        yield "loss", f"{self.accuracy.loss:.4f}"
        yield "top-1 accuracy", f"{self.accuracy.top1:.2%}"
        if self.accuracy.top5 is not None:
            yield "top-5 accuracy", f"{self.accuracy.top5:.2%}"
        known = [(recall, name) for name, recall in zip(self.classes, recalls(counts), strict=True)]
        recall, name = min(((share, name) for share, name in known if share is not None), key=lambda pair: pair[0])
        yield "lowest recall", f"{name}: {recall:.2%}"
        for mistake in most_frequent_mistakes(counts, MISTAKES_SHOWN):
            yield "mistake", f"{self.classes[mistake.label]} as {self.classes[mistake.guess]}: {mistake.samples:,}"

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


def finite(value: float | None) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None
