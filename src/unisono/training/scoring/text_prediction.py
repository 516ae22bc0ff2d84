"""Prediction of a text: the loss of its tokens, and the most probable tokens after it.

tokens ─ windows ─ network ─▶ loss of each token ─ mean ─▶ loss, perplexity, bits per byte
tokens ─ context ─ network ─▶ scores of the next token ─▶ "e" 31.2%, "t" 9.0%
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from unisono.data.kinds.text import Tokenizer
from unisono.training.accuracy import Accuracy, accuracy_of
from unisono.training.scoring.evaluate import sum_scores
from unisono.training.scoring.evaluation import finite
from unisono.training.scoring.network_prediction import NetworkPrediction, PredictOptions, Probability, most_probable
from unisono.training.scoring.text_windows import context_after, cut_windows

REPLACED = "\N{REPLACEMENT CHARACTER}"
"""Character in place of bytes that are no text."""


@dataclass(frozen=True)
class TextPrediction(NetworkPrediction):
    """Score of a text, and the tokens that follow it."""

    tokens: int
    accuracy: Accuracy
    """Loss and accuracy of its tokens."""
    bits_per_byte: float
    """Bits of all its tokens / bytes of the text in UTF-8."""
    following: tuple[Probability, ...]
    """Most probable next tokens, best first."""

    def words(self) -> str:
        """Return the score, and the next tokens in quotes."""
        following = "  ".join(f"{quoted(name)} {probability:.2%}" for name, probability in self.following)
        parts = [
            f"{self.tokens:,} token{'s' * (self.tokens > 1)}",
            f"loss {self.accuracy.loss:.4f}",
            f"perplexity {self.accuracy.perplexity:.2f}",
            f"{self.bits_per_byte:.4f} bits per byte",
            f"next {following}",
        ]
        return "  ".join(parts)

    def as_data(self) -> dict[str, Any]:
        """Return the score and the next tokens."""
        return {
            "tokens": self.tokens,
            "loss": finite(self.accuracy.loss),
            "perplexity": finite(self.accuracy.perplexity),
            "bits_per_byte": finite(self.bits_per_byte),
            "next": [{"token": name, "probability": share} for name, share in self.following],
        }


def quoted(text: str) -> str:
    """Return a text in quotes, with characters that are not printable escaped as in JSON and Python.

    >>> print(quoted('für "x"\\n'))
    "für \\"x\\"\\n"
    """
    escaped = (
        f"\\{each}" if each in '"\\' else each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )
    return f'"{"".join(escaped)}"'


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or its name where that is no whole character."""
    text = tokenizer.decode([token])
    return tokenizer.tokens[token] if REPLACED in text else text


def predict_text(
    network: torch.nn.Module,
    text: torch.Tensor,
    nbytes: int,
    tokenizer: Tokenizer,
    window: int,
    options: PredictOptions,
) -> TextPrediction:
    """Return the prediction of a text of tokens, int64, (tokens,), which has `nbytes` bytes in UTF-8.

    The network, in evaluation mode, takes windows of `window` tokens.
    """
    inputs, labels = cut_windows(text, tokenizer.end_of_text, window)
    batches = zip(torch.split(inputs, options.batch), torch.split(labels, options.batch), strict=True)
    counts, _ = sum_scores(network, batches, None, options.dtype, options.within)
    accuracy = accuracy_of(counts, len(text))
    scores = score_next(network, text, tokenizer.end_of_text, window, options)
    following = most_probable(scores, lambda token: token_text(tokenizer, token), options.most)
    bits = accuracy.loss * len(text) / math.log(2)
    return TextPrediction(len(text), accuracy, bits / nbytes, following)


def score_next(
    network: torch.nn.Module, text: torch.Tensor, end_of_text: int, window: int, options: PredictOptions
) -> torch.Tensor:
    """Return the scores of the token after a text, (vocabulary,)."""
    inputs, last = context_after(text, end_of_text, window)
    with torch.no_grad(), options.within():
        scores: torch.Tensor = network(inputs)
    return scores[0, last]
