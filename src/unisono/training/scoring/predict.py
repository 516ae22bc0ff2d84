"""Predictions of files, one at a time; a file that cannot be read has its error in place of a prediction.

scores (1, 3, 2) of a b c ─ softmax ─▶ b 66.5%, c 24.5%, a 9.0%

Inputs are made as the run's test samples were: packed, then transformed without random changes.

    file ──encode──▶ bytes as in a pack ──transform: size, mean and std of the run's pack──▶ network input

A run on raw images takes image files. So does one on a data set that comes with Unisono, whose values are not
normalised: digits are white on black. Of a text, the loss of its tokens is computed, and the tokens after it predicted:

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from unisono.data.builtin import BUILTIN_DATASETS
from unisono.data.kinds import KINDS, RAW, find_kind
from unisono.data.kinds.text import BYTES, Tokenizer, make_tokenizer
from unisono.data.loading import InputFacts
from unisono.data.options import DataOptions
from unisono.data.pack import TRAIN_SPLITS, split_folder
from unisono.data.pack.index import About, Index, read_index
from unisono.data.pack.packing import PackOptions
from unisono.errors import DecodeError, PackError, UsageError
from unisono.training.accuracy import accuracy_of
from unisono.training.measures import finite
from unisono.training.scoring.evaluate import Forward, sum_scores

IMAGE_CHANNELS = (1, 3)
"""Numbers of channels that image files are decoded to."""

REPLACED = "\N{REPLACEMENT CHARACTER}"
"""Character in place of bytes that are no text."""

NO_LABEL = -100
"""Label of places after a text, which PyTorch's cross entropy leaves out."""

Prediction = tuple[str, dict[str, Any]]
"""Prediction of a network for the contents of a file, as a line and as data for JSON."""


def predict(
    forward: Forward, inputs: FileInputs | TextInputs, files: Iterable[Path], most: int
) -> Iterator[Prediction]:
    """Yield the prediction of each file by a network in evaluation mode, or its "error"; `most` classes are named."""
    for file in files:
        try:
            yield inputs.predict(forward, file, most)
        except (OSError, DecodeError) as error:
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"{error.strerror or error}; give the path of a file that can be read"
            yield reason, {"error": reason}


def most_probable(scores: torch.Tensor, name_of: Callable[[int], str], most: int) -> list[tuple[str, float]]:
    """Return the `most` most probable classes or tokens with their probabilities, best first, from scores (classes,).
    Raises UsageError where these are not finite."""
    if not bool(torch.isfinite(scores).all()):
        raise UsageError("the network's scores are not finite: its training has diverged; train it at a lower rate")
    best = scores.double().softmax(0).topk(min(most, len(scores)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(name_of(index), probability) for index, probability in pairs]


def open_inputs(data: DataOptions, tokenizer: str, batch: int = 1) -> FileInputs | TextInputs:
    """Return the inputs for files of the data that a recipe trains on.

    `tokenizer` and `batch` are those of `TextInputs`. Raises PackError where the recipe's pack is missing, UsageError
    for a tokenizer where it trains on other samples than texts.
    """
    if data.pack:
        index = read_index(split_folder(Path(data.pack), TRAIN_SPLITS))
    else:  # an index that describes a data set that comes with Unisono
        builtin, none = BUILTIN_DATASETS[data.name](), np.zeros(0, np.int32)
        channels, height, width = builtin.test.inputs.shape[1:]
        names = tuple(map(str, range(builtin.classes)))
        about = About(RAW, names, (height, width, channels), mean=(0.0,) * channels, std=(1.0,) * channels)
        index = Index(about, none, none, none, none, none)
    kind = find_kind(index.about.kind)
    if kind.labels_are_tokens:
        return TextInputs(index, tokenizer, batch)
    if tokenizer:
        raise UsageError(f"--tokenizer {tokenizer} is for texts, but the run takes {kind.plural}; omit it")
    return FileInputs(index, data if data.pack else DataOptions())


class FileInputs(InputFacts):
    """Network inputs from files of the kind that a run was trained on."""

    def __init__(self, index: Index, options: DataOptions) -> None:
        """Prepare the transform of the samples of `index`. Raises PackError where `options` or files do not fit."""
        about = index.about
        if (name := find_kind(about.kind).file_kind) and len(about.mean) not in IMAGE_CHANNELS:
            raise PackError(
                f"{index.folder} has samples of {len(about.mean)} channels, which no {name} file has; pack the "
                "samples, and use unisono evaluate --pack"
            )
        self._kind = find_kind(name or about.kind)
        self._transform = self._kind.transform(index, options)()
        self._packing = PackOptions(short_side=about.short_side, quality=about.quality)
        self.names, shape = about.classes, self._transform.shape
        """Names of the classes."""
        super().__init__(len(about.classes), shape[-1], self._transform.batch(torch.zeros(1, *shape)))

    def read(self, path: Path) -> torch.Tensor:
        """Return the input of a file, a batch of one sample. Raises OSError where it cannot be read, DecodeError where
        it is broken or of another kind."""
        content = path.read_bytes()
        wanted = f"the run takes {self._kind.plural}: {', '.join(self._kind.endings)}"
        if not content:
            raise DecodeError(f"it is empty; {wanted}")
        for kind in map(find_kind, KINDS):
            if kind is not self._kind and kind.is_signed(content):
                raise DecodeError(f"it holds {kind.plural}; {wanted}")
        memory = torch.empty((1, *self._transform.shape))
        try:
            self._transform.into(memory[0], memoryview(self._kind.encode(content, self._packing)), None)
        except DecodeError as error:
            raise DecodeError(f"{error}; {wanted}") from error
        return self._transform.batch(memory)

    def predict(self, forward: Forward, path: Path, most: int) -> Prediction:
        """Return the most probable classes of a file. Raises OSError and DecodeError as `read` does."""
        best = most_probable(forward(self.read(path))[0], self.names.__getitem__, most)
        line = "  ".join(f"{name} {share:.2%}" for name, share in best)
        return line, {"classes": [{"class": name, "probability": share} for name, share in best]}


class TextInputs(InputFacts):
    """Files of text, for a network that was trained on windows of tokens."""

    def __init__(self, index: Index, tokenizer: str, batch: int = 1) -> None:
        """Take files of the tokens of the pack `index`; the network takes `batch` windows at once.

        `tokenizer` is the file of the pack's tokenizer, empty for bytes. Raises UsageError or PackError for another.
        """
        about = index.about
        self._tokenizer, self._batch = tokenizer_of(index, tokenizer), batch
        window = find_kind(about.kind).labels_per_sample(about.shape)
        super().__init__(len(about.classes), window, torch.zeros((1, window), dtype=torch.int64))

    def predict(self, forward: Forward, path: Path, most: int) -> Prediction:
        """Return the prediction of a file. Raises OSError where it cannot be read, DecodeError where it is no text."""
        try:
            text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise DecodeError(f"it is no text in UTF-8: {error}; convert it") from error
        tokens = torch.from_numpy(self._tokenizer.encode(text))
        if not len(tokens):
            raise DecodeError("it is empty; the run takes texts in UTF-8")
        return self.predict_tokens(forward, tokens, len(text.encode()), most)

    def predict_tokens(self, forward: Forward, text: torch.Tensor, nbytes: int, most: int) -> Prediction:
        """Return the prediction of a text of tokens, int64, (tokens,), of `nbytes` bytes in UTF-8."""
        tokenizer, window = self._tokenizer, self.channels
        inputs, labels = cut_windows(text, tokenizer.end_of_text, window)
        batches = zip(torch.split(inputs, self._batch), torch.split(labels, self._batch), strict=True)
        scored = accuracy_of(sum_scores(forward, batches, None)[0], len(text))
        context, last = context_after(text, tokenizer.end_of_text, window)
        scores = forward(context).flatten(0, -2)[last, : len(tokenizer.tokens)]  # some have more, or rows of tokens
        following = most_probable(scores, lambda token: token_text(tokenizer, token), most)
        bits = scored.loss * len(text) / math.log(2) / nbytes
        parts = [
            f"{len(text):,} token{'s' * (len(text) > 1)}",
            f"loss {scored.loss:.4f}",
            f"perplexity {scored.perplexity:.2f}",
            f"{bits:.4f} bits per byte",
            f"next {'  '.join(f'{quoted(name)} {share:.2%}' for name, share in following)}",
        ]
        data = {
            "tokens": len(text),
            "loss": finite(scored.loss),
            "perplexity": finite(scored.perplexity),
            "bits_per_byte": finite(bits),
            "next": [{"token": name, "probability": share} for name, share in following],
        }
        return "  ".join(parts), data


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or its name where that is no whole character."""
    text = tokenizer.decode([token])
    return tokenizer.tokens[token] if REPLACED in text else text


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


def cut_windows(text: torch.Tensor, end_of_text: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the labels of a text of tokens, int64, (tokens,): both (windows, window)."""
    fill = 0, -len(text) % window
    inputs, labels = pad(text[:-1], (1, fill[1]), value=end_of_text), pad(text, fill, value=NO_LABEL)
    return inputs.view(-1, window), labels.view(-1, window)


def context_after(text: torch.Tensor, end_of_text: int, window: int) -> tuple[torch.Tensor, int]:
    """Return the window before the token that follows a text, (1, window), and the place of its last token."""
    known = pad(text, (1, 0), value=end_of_text)[-window:]
    return pad(known, (0, window - len(known)), value=end_of_text)[None], len(known) - 1


def tokenizer_of(index: Index, name: str) -> Tokenizer:
    """Return the tokenizer of a pack of texts: bytes, or that of the file `name`. Raises UsageError where a file is
    needed and none is given, PackError where its tokens are not those of the pack."""
    classes = index.about.classes
    bytes_per_label = find_kind(index.about.kind).bytes_per_label(classes)
    if not name and bytes_per_label is None:
        raise UsageError(
            f"{index.folder} has {len(classes):,} tokens that are no bytes: give the tokenizer.json that it was packed "
            "with, --tokenizer FILE"
        )
    tokenizer = make_tokenizer(name or BYTES)
    remedy = "give the tokenizer.json that it was packed with" if bytes_per_label is None else "omit --tokenizer"
    if tokenizer.tokens != classes:
        raise PackError(
            f"--tokenizer {name} has {len(tokenizer.tokens):,} tokens, which are not the {len(classes):,} of "
            f"{index.folder}; {remedy}"
        )
    return tokenizer
