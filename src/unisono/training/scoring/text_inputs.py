"""Files of text, tokenised as the texts of a run's pack were."""

from __future__ import annotations

from pathlib import Path

import torch

from unisono.data.kinds import find_kind
from unisono.data.kinds.text import BYTES, Tokenizer, make_tokenizer
from unisono.data.pack.index import Index
from unisono.errors import DecodeError, PackError, UsageError
from unisono.training.scoring.network_prediction import PredictOptions
from unisono.training.scoring.text_prediction import TextPrediction, predict_text


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
