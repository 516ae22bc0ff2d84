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
from pathlib import Path

import torch

from unisono.data.kinds import find_kind
from unisono.data.kinds.text import BYTES, Tokenizer, make_tokenizer
from unisono.data.pack.index import Index
from unisono.errors import DecodeError, PackError, UsageError
from unisono.training.accuracy import accuracy_of
from unisono.training.scoring.evaluate import Forward, sum_scores
from unisono.training.scoring.evaluation import finite
from unisono.training.scoring.predict import NetworkPrediction, PredictOptions, most_probable

REPLACED = "\N{REPLACEMENT CHARACTER}"
"""Character in place of bytes that are no text."""


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
    forward: Forward, text: torch.Tensor, nbytes: int, tokenizer: Tokenizer, window: int, options: PredictOptions
) -> NetworkPrediction:
    """Return the loss of a text of tokens, int64, (tokens,), of `nbytes` bytes in UTF-8, and the tokens that follow it.

    The network takes windows of `window` tokens.
    """
    inputs, labels = cut_windows(text, tokenizer.end_of_text, window)
    batches = zip(torch.split(inputs, options.batch), torch.split(labels, options.batch), strict=True)
    found = accuracy_of(sum_scores(forward, batches, None)[0], len(text))
    context, last = context_after(text, tokenizer.end_of_text, window)
    following = most_probable(forward(context)[0, last], lambda token: token_text(tokenizer, token), options.most)
    bits = found.loss * len(text) / math.log(2) / nbytes
    words = [
        f"{len(text):,} token{'s' * (len(text) > 1)}",
        f"loss {found.loss:.4f}",
        f"perplexity {found.perplexity:.2f}",
        f"{bits:.4f} bits per byte",
        f"next {'  '.join(f'{quoted(name)} {share:.2%}' for name, share in following)}",
    ]
    data = {
        "tokens": len(text),
        "loss": finite(found.loss),
        "perplexity": finite(found.perplexity),
        "bits_per_byte": finite(bits),
        "next": [{"token": name, "probability": share} for name, share in following],
    }
    return NetworkPrediction("  ".join(words), data)


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

    def predict(self, forward: Forward, path: Path, options: PredictOptions) -> NetworkPrediction:
        """Return the prediction of a file. Raises OSError where it cannot be read, DecodeError where it is no text."""
        try:
            text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise DecodeError(f"it is no text in UTF-8: {error}; convert it") from error
        tokens = torch.from_numpy(self._tokenizer.encode(text))
        if not len(tokens):
            raise DecodeError("it is empty; the run takes texts in UTF-8")
        return predict_text(forward, tokens, len(text.encode()), self._tokenizer, self.channels, options)


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
