"""Evaluation of a checkpoint: its measures as data for JSON, and as rows of a table.

a label a sample       `ClassEvaluation`     accuracy, recall and precision of each class, confusion
a label each token     `TokenEvaluation`     perplexity, bits per byte

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from unisono.training.accuracy import Accuracy
from unisono.training.scoring.confusion import Counts, draw_confusion, most_frequent_mistakes, precisions, recalls

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

TIMED_SECONDS = 0.5
"""Seconds after which no further pass of a batch size is timed."""

MIN_PASSES, MAX_PASSES = 3, 100
"""Fewest and most passes that are timed of a batch size."""


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
class Evaluation(ABC):
    """Measures of a network on a test set."""

    samples: int
    """Number of test samples."""
    accuracy: Accuracy
    """Accuracy and loss of all labels."""
    throughput: Sequence[BatchThroughput] = ()
    """Forward passes on one rank, by batch size; empty if they were not measured."""

    speed_unit: ClassVar[str] = "samples/s"
    """Unit of `speed`."""
    remark: ClassVar[str] = ""
    """Words on what an evaluation of this kind does not have."""

    @abstractmethod
    def own_data(self) -> dict[str, Any]:
        """Return the measures that only evaluations of this kind have, as data for JSON."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the table: a name, and its value in words."""

    def images(self, title: str) -> Mapping[str, str]:  # noqa: ARG002  a default
        """Return SVG documents by file name; `title` has the run and its data."""
        return {}

    def speed(self, entry: BatchThroughput) -> float:
        """Return the throughput at a batch size in `speed_unit`."""
        return entry.samples_per_second

    def throughput_data(self, entry: BatchThroughput) -> dict[str, Any]:
        """Return the throughput at a batch size as data for JSON."""
        return entry._asdict()

    def as_data(self) -> dict[str, Any]:
        """Return the evaluation as data for JSON; measures that are not finite, and shares of nothing, are None."""
        return {
            "samples": self.samples,
            "loss": finite(self.accuracy.loss),
            "top1": self.accuracy.top1,
            "top5": self.accuracy.top5,
            **self.own_data(),
            "throughput": [self.throughput_data(entry) for entry in self.throughput],
        }


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def bits_per_byte(loss: float, bytes_per_token: int) -> float:
    """Return the bits that a byte of text takes at this loss, in nats per token.

    >>> bits_per_byte(2 * math.log(2), 1)
    2.0
    """
    return loss / math.log(2) / bytes_per_token


@dataclass(frozen=True, kw_only=True)
class TokenEvaluation(Evaluation):
    """Measures of a network on windows of text, all of which have the same number of tokens."""

    tokens_per_sample: int
    """Labels of a window."""
    bytes_per_token: int | None
    """Bytes of text that a token stands for; None where they differ."""

    speed_unit: ClassVar[str] = "tokens/s"
    remark: ClassVar[str] = "tokens have no picture of their confusion"

    @property
    def tokens(self) -> int:
        """Number of labels."""
        return self.samples * self.tokens_per_sample

    def own_data(self) -> dict[str, Any]:
        """Return the number of tokens, perplexity and bits per byte."""
        known = self.bytes_per_token is not None
        return {
            "tokens": self.tokens,
            "perplexity": finite(self.accuracy.perplexity),
            "bits_per_byte": finite(self._bits()) if known else None,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield numbers, loss, perplexity, and the accuracy of the first and of the first five guesses."""
        yield "samples", f"{self.samples:,}"
        yield "tokens", f"{self.tokens:,}"
        yield "loss per token", f"{self.accuracy.loss:.4f}"
        yield "perplexity", f"{self.accuracy.perplexity:.2f}"
        if self.bytes_per_token is not None:
            yield "bits per byte", f"{self._bits():.4f}"
        yield "token accuracy", f"{self.accuracy.top1:.2%}"
        if self.accuracy.top5 is not None:
            yield "token accuracy, top-5", f"{self.accuracy.top5:.2%}"

    def speed(self, entry: BatchThroughput) -> float:
        """Return tokens per second."""
        return entry.samples_per_second * self.tokens_per_sample

    def throughput_data(self, entry: BatchThroughput) -> dict[str, Any]:
        """Return the throughput at a batch size, with tokens per second."""
        return {**entry._asdict(), "tokens_per_second": self.speed(entry)}

    def _bits(self) -> float:
        assert self.bytes_per_token is not None, "tokens are bytes"
        return bits_per_byte(self.accuracy.loss, self.bytes_per_token)


CONFUSION = "confusion.svg"
"""File of the picture."""

MISTAKES_SHOWN = 3
"""Number of mistakes in the table."""


@dataclass(frozen=True, kw_only=True)
class ClassEvaluation(Evaluation):
    """Measures of a network on samples that have a class each."""

    classes: tuple[str, ...]
    confusion: Counts
    """Samples by label and first guess."""

    def own_data(self) -> dict[str, Any]:
        """Return each class and the confusion."""
        counts = self.confusion
        each = zip(self.classes, counts.sum(axis=1).tolist(), recalls(counts), precisions(counts), strict=True)
        return {
            "classes": [
                {"class": name, "samples": samples, "recall": recall, "precision": precision}
                for name, samples, recall, precision in each
            ],
            "confusion": counts.tolist(),
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield loss, accuracy, the class with the lowest recall, and the most frequent mistakes."""
        yield "samples", f"{self.samples:,}"
        yield "loss", f"{self.accuracy.loss:.4f}"
        yield "top-1 accuracy", f"{self.accuracy.top1:.2%}"
        if self.accuracy.top5 is not None:
            yield "top-5 accuracy", f"{self.accuracy.top5:.2%}"
        known = [(recall, name) for name, recall in zip(self.classes, recalls(self.confusion), strict=True)]
        recall, name = min(((share, name) for share, name in known if share is not None), key=lambda pair: pair[0])
        yield "lowest recall", f"{name}: {recall:.2%}"
        for mistake in most_frequent_mistakes(self.confusion, MISTAKES_SHOWN):
            yield "mistake", f"{self.classes[mistake.label]} as {self.classes[mistake.guess]}: {mistake.samples:,}"

    def images(self, title: str) -> Mapping[str, str]:
        """Return the picture of the confusion."""
        return {CONFUSION: draw_confusion(self.confusion, self.classes, f"{title}: top-1 {self.accuracy.top1:.2%}")}
