"""Windows of a stream of tokens as a source of samples, and the files of texts, by split.

corpus/train/a.txt     a folder for each split,       corpus.jsonl     or no splits: the last tenth of the tokens
corpus/test/b.txt      or a name: test-00000.parquet                   is the test set (`with_test_split`)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from unisono.data.kinds import TEXT
from unisono.data.sources.source import SPLITS, Source
from unisono.data.text.options import TextOptions
from unisono.data.text.tokenizers import make_tokenizer
from unisono.data.text.windows import TokenStream, join_texts, window_at, window_count
from unisono.errors import PackError


def files_by_split(path: Path, endings: Sequence[str], by_name: bool) -> dict[str, list[Path]]:
    """Return the files with these endings, of each split; empty if there are none. Hidden files are left out.

    `by_name`: files side by side are of the split with which their names begin. Raises PackError if only some files
    are in splits.
    """
    if path.is_file():
        return {"": [path]} if path.suffix in endings else {}
    found: dict[str, list[Path]] = {}
    for file in sorted(each for ending in endings for each in path.rglob(f"*{ending}")):
        parts = file.relative_to(path).parts
        if file.is_file() and not any(part.startswith(".") for part in parts):
            word = parts[0] if len(parts) > 1 else re.split(r"[-_.]", file.name)[0] if by_name else ""
            found.setdefault(word if word in SPLITS else "", []).append(file)
    if len(found) > 1 and "" in found:
        others = ", ".join(sorted(set(found) - {""}))
        raise PackError(f"{path}: {found[''][0].name} is in no split, but others are in {others}; move it, or pack one")
    return found


def tokenised(
    splits: dict[str, list[Path]], read: Callable[[Sequence[Path]], Iterable[str]], options: TextOptions
) -> dict[str, TokenStream] | None:
    """Return the tokens of the texts that `read` gives from the files of each split; None if there is no split."""
    if not splits:
        return None
    tokenizer = make_tokenizer(options.tokenizer)
    return {
        name: TokenStream(join_texts(read(files), tokenizer), tokenizer.tokens, (*files, *tokenizer.files))
        for name, files in splits.items()
    }


def windows_source(stream: TokenStream, window: int, path: Path, split: str) -> Source:
    """Return the windows of `window` labels in a stream. Raises PackError if it is too short for one."""
    count = window_count(len(stream.tokens), window)
    if not count:
        raise PackError(
            f"{path}: {split or 'the text'} has {len(stream.tokens)} tokens, a window {window + 1}: give more text, "
            "or a smaller --window"
        )
    sizes = np.full(count, (window + 1) * stream.tokens.itemsize, np.int64)
    keys = [f"{split or path.name}/{number}" for number in range(count)]

    def read(number: int) -> bytes:
        return window_at(stream.tokens, window, number)

    return Source(TEXT, stream.names, keys, np.zeros(count, np.int64), sizes, read, (window + 1,), stream.files)
