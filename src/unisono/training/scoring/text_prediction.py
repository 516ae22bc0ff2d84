"""Prediction of a text: the loss of its tokens, and the most probable tokens after it.

tokens ─ windows ─ network ─▶ loss of each token ─ mean ─▶ loss, perplexity, bits per byte
tokens ─ context ─ network ─▶ scores of the next token ─▶ "e" 31.2%, "t" 9.0%

Each token of the text is a label once:

    text        a b c d e                      window = 3
    stream      . a b c d e                    . ends a text: in training it stands before the next one, too
    inputs      . a b     c d .                the last window is filled up with it
    labels      a b c     d e -                - is no label
    context         c d e                      the last tokens, whose next one is predicted

Windows are cut as in a pack: a token sees those before it in its window, never those of the window before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.data.kinds import find_kind
from unisono.data.kinds.text import BYTES, Tokenizer, make_tokenizer
from unisono.data.pack.index import Index
from unisono.errors import DecodeError, PackError, UsageError
from unisono.training.accuracy import Accuracy, accuracy_of
from unisono.training.scoring.evaluate import sum_scores
from unisono.training.scoring.evaluation import finite
from unisono.training.scoring.predict import NetworkPrediction, PredictOptions, Probability, most_probable

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


NO_LABEL = -100
"""Label of places after a text, which PyTorch's cross entropy leaves out."""


def cut_windows(text: torch.Tensor, end_of_text: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the labels of a text of tokens, int64, (tokens,): both (windows, window)."""
    count = -(-len(text) // window)
    inputs = torch.full((count * window,), end_of_text)
    labels = torch.full((count * window,), NO_LABEL)
    inputs[1 : len(text)] = text[:-1]
    labels[: len(text)] = text
    return inputs.view(count, window), labels.view(count, window)


def context_after(text: torch.Tensor, end_of_text: int, window: int) -> tuple[torch.Tensor, int]:
    """Return the window before the token that follows a text, (1, window), and the place of its last token."""
    known = torch.cat([torch.tensor([end_of_text]), text])[-window:]
    inputs = torch.full((1, window), end_of_text)
    inputs[0, : len(known)] = known
    return inputs, len(known) - 1


class TextInputs:
    """Files of text, for a network that was trained on windows of tokens."""

    def __init__(self, index: Index, tokenizer: str) -> None:
        """Take files of the tokens of the pack `index`.

        `tokenizer` is the file of the pack's tokenizer, empty for bytes. Raises UsageError or PackError for another.
        """
        about = index.about
        self._tokenizer = tokenizer_of(index, tokenizer)
        self.classes = len(about.classes)
        self.channels = find_kind(about.kind).labels_per_sample(about.shape)
        """Tokens of a window."""

    def blank(self, samples: int) -> torch.Tensor:
        """Return windows of token 0."""
        return torch.zeros((samples, self.channels), dtype=torch.int64)

    def predict(self, network: torch.nn.Module, path: Path, options: PredictOptions) -> TextPrediction:
        """Return the prediction of a file. Raises OSError where it cannot be read, DecodeError where it is no text."""
        try:
            text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise DecodeError(f"it is no text in UTF-8: {error}; convert it") from error
        tokens = torch.from_numpy(self._tokenizer.encode(text))
        if not len(tokens):
            raise DecodeError("it is empty; the run takes texts in UTF-8")
        return predict_text(network, tokens, len(text.encode()), self._tokenizer, self.channels, options)


def tokenizer_of(index: Index, name: str) -> Tokenizer:
    """Return the tokenizer of a pack of texts: bytes, or that of the file `name`.

    Raises UsageError where a file is needed and none is given, PackError where its tokens are not those of the pack.
    """
    classes = index.about.classes
    bytes_per_label = find_kind(index.about.kind).bytes_per_label(classes)
    if not name and bytes_per_label is None:
        raise UsageError(
            f"{index.folder} has {len(classes):,} tokens that are no bytes: give the tokenizer.json that it was packed "
            "with, --tokenizer FILE"
        )
    found = make_tokenizer(name or BYTES)
    remedy = "give the tokenizer.json that it was packed with" if bytes_per_label is None else "omit --tokenizer"
    if found.tokens != classes:
        raise PackError(
            f"--tokenizer {name} has {len(found.tokens):,} tokens, which are not the {len(classes):,} of "
            f"{index.folder}; {remedy}"
        )
    return found
