"""Evaluation of texts: each token is a label, and the token after each input token is what the network has to guess.

    label                    a      b      c      d
    probability of it       1/2    1/4    1/8    1/4
    cross entropy, bits      1      2      3      2      mean 2 bits: loss 2 ln 2 = 1.386, perplexity 2^2 = 4

Perplexity is the exponential of the loss: guesses among so many tokens of one probability are as good. Losses per token
cannot be compared between tokenizers; bits per byte can, and are known where each token is a byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from unisono.training.scoring.evaluation import Evaluation, finite
from unisono.training.scoring.throughput import BatchThroughput


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
