"""Network inputs from files, as the run's test samples were made: packed, then transformed without random changes.

    file ──encode──▶ bytes as in a pack ──transform: size, mean and std of the run's pack──▶ network input

A run on raw images takes image files. So does one on a data set that comes with Unisono, whose values are not
normalised: digits are white on black.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from unisono.data.builtin import BUILTIN_DATASETS
from unisono.data.kinds import KINDS, RAW, find_kind
from unisono.data.options import DataOptions
from unisono.data.pack.index import About, Index, read_index
from unisono.data.pack.layout import TRAIN_SPLITS, split_folder
from unisono.data.pack.packing import PackOptions
from unisono.errors import DecodeError, PackError, UsageError
from unisono.training.scoring.evaluate import Forward
from unisono.training.scoring.predict import NetworkPrediction, PredictOptions, most_probable
from unisono.training.scoring.text_prediction import TextInputs

IMAGE_CHANNELS = (1, 3)
"""Numbers of channels that image files are decoded to."""


class FileInputs:
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
        self.names = about.classes
        """Names of the classes."""
        self.classes, self.channels = len(about.classes), self._transform.shape[-1]

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return self._transform.batch(torch.zeros((samples, *self._transform.shape)))

    def read(self, path: Path) -> torch.Tensor:
        """Return the input of a file, a batch of one sample.

        Raises OSError where it cannot be read, DecodeError where it is broken or of another kind.
        """
        content = path.read_bytes()
        wanted = f"the run takes {self._kind.plural}: {', '.join(self._kind.endings)}"
        if not content:
            raise DecodeError(f"it is empty; {wanted}")
        for other in map(find_kind, KINDS):
            if other is not self._kind and other.signature and content.startswith(other.signature):
                raise DecodeError(f"it holds {other.plural}; {wanted}")
        memory = torch.empty((1, *self._transform.shape))
        try:
            self._transform.into(memory[0], memoryview(self._kind.encode(content, PackOptions())), None)
        except DecodeError as error:
            raise DecodeError(f"{error}; {wanted}") from error
        return self._transform.batch(memory)

    def predict(self, forward: Forward, path: Path, options: PredictOptions) -> NetworkPrediction:
        """Return the most probable classes of a file. Raises OSError and DecodeError as `read` does."""
        found = most_probable(forward(self.read(path))[0], self.names.__getitem__, options.most)
        words = "  ".join(f"{name} {share:.2%}" for name, share in found)
        return NetworkPrediction(words, {"classes": [{"class": name, "probability": share} for name, share in found]})


def open_inputs(data: DataOptions, tokenizer: str) -> FileInputs | TextInputs:
    """Return the inputs for files of the data that a recipe trains on.

    `tokenizer` is that of `TextInputs`. Raises PackError where the recipe's pack is missing, UsageError for a tokenizer
    where it trains on other samples than texts.
    """
    index = _index(data)
    kind = find_kind(index.about.kind)
    if kind.labels_are_tokens:
        return TextInputs(index, tokenizer)
    if tokenizer:
        raise UsageError(f"--tokenizer {tokenizer} is for texts, but the run takes {kind.plural}; omit it")
    return FileInputs(index, data if data.pack else DataOptions())


def _index(data: DataOptions) -> Index:
    """Return the index of a recipe's training set, or one that describes a data set that comes with Unisono."""
    if data.pack:
        return read_index(split_folder(Path(data.pack), TRAIN_SPLITS))
    found, none = BUILTIN_DATASETS[data.name](), np.zeros(0, np.int32)
    channels, height, width = found.test.inputs.shape[1:]
    names = tuple(map(str, range(found.classes)))
    about = About(RAW, names, (height, width, channels), mean=(0.0,) * channels, std=(1.0,) * channels)
    return Index(about, none, none, none, none, none)
