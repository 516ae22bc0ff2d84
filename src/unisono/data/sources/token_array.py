"""Texts that are tokenised already: npy files with one dimension of integers, joined as they are.

    train.npy   test.npy   or one file

The vocabulary is all numbers up to the largest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unisono.data.sources.text_windows import files_by_split
from unisono.data.text.options import BYTES, TextOptions
from unisono.data.text.windows import TokenStream, token_dtype
from unisono.errors import PackError

ENDINGS = (".npy",)
MAX_VOCABULARY = 1 << 20
"""Tokens of the largest vocabulary that there may be: larger numbers are something else."""


def find(path: Path, options: TextOptions) -> dict[str, TokenStream] | None:
    """Return the tokens of each split of npy files; None if there are none.

    Raises PackError if they are no tokens, or a tokenizer is named.
    """
    splits = files_by_split(path, ENDINGS, by_name=True)
    if splits and options.tokenizer != BYTES:
        raise PackError(f"{path} is tokenised already; leave --tokenizer {options.tokenizer} away")
    largest = max((_largest(file) for files in splits.values() for file in files), default=0)
    names = tuple(str(number) for number in range(largest + 1))
    return {name: _stream(files, names) for name, files in splits.items()} or None


def _stream(files: Sequence[Path], names: tuple[str, ...]) -> TokenStream:
    dtype = token_dtype(len(names))
    return TokenStream(np.concatenate([np.load(file, mmap_mode="r").astype(dtype) for file in files]), names, files)


def _largest(file: Path) -> int:
    """Return the largest token of a file. Raises PackError if its numbers are no tokens."""
    try:
        tokens = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:  # the last of an empty file
        raise PackError(f"cannot read {file}: {error}") from error
    if not isinstance(tokens, np.ndarray):
        raise PackError(f"{file} holds several arrays: save one with numpy.save")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise PackError(f"{file} has {tokens.dtype} numbers of shape {tokens.shape}; tokens are integers, (tokens,)")
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= MAX_VOCABULARY:
        raise PackError(f"{file} has numbers from {least} to {largest}; tokens are from 0 to {MAX_VOCABULARY - 1:,}")
    return largest
