"""Texts joined to one stream of tokens, and cut into windows.

    texts       "ab"  "c"  "de"            window = 2
    stream      a b . c . d e .            . ends a text
    windows     a b .                      inputs a b, labels b .
                    . c .                  inputs . c, labels c .
                        . d e              inputs . d, labels d e

A window has n + 1 tokens, and its last one is the first of the next: each token but the stream's first is a label once.
At most n tokens at the end are left over. In a pack a window is (n + 1) numbers of 2 bytes, little-endian, or of 4 for
more than 65,536 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.text.tokenizers import Tokenizer

TEST_SHARE = 10
"""Texts without splits: the last 1/10 of the tokens is the test set."""


class TokenStream(NamedTuple):
    """Tokens of a split."""

    tokens: NDArray[Any]
    """Numbers, of `token_dtype`."""
    names: tuple[str, ...]
    """Names of the tokens, by number."""
    files: Sequence[Path]
    """Files that they come from."""


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the number format of tokens in a pack."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def join_texts(texts: Iterable[str], tokenizer: Tokenizer) -> NDArray[Any]:
    """Return the tokens of all texts, each followed by the one that ends it; empty texts are left out."""
    dtype, end = token_dtype(len(tokenizer.tokens)), [tokenizer.end_of_text]
    parts = [np.append(tokenizer.encode(text), end).astype(dtype) for text in texts if text]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def with_test_split(streams: dict[str, TokenStream]) -> dict[str, TokenStream]:
    """Return the splits, where there are none the first nine tenths of the tokens as "train", the rest as "test"."""
    if set(streams) != {""}:
        return streams
    whole = streams[""]
    cut = len(whole.tokens) - len(whole.tokens) // TEST_SHARE
    return {"train": whole._replace(tokens=whole.tokens[:cut]), "test": whole._replace(tokens=whole.tokens[cut:])}


def window_count(tokens: int, window: int) -> int:
    """Return the number of windows in a stream of so many tokens."""
    return max(0, tokens - 1) // window


def window_at(tokens: NDArray[Any], window: int, number: int) -> bytes:
    """Return a window of a stream as it lies in a pack."""
    return tokens[number * window : (number + 1) * window + 1].tobytes()
