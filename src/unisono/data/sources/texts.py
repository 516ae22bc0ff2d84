"""Texts in files, by split: their tokens, joined to one stream and cut into windows (`kinds/text.py`).

corpus/train/a.txt     a folder for each split,       corpus.jsonl     or no splits: the last tenth of the tokens
corpus/test/b.txt      or a word of each name: wiki.train.txt          is the test set

.txt .md .rst .py      a text in UTF-8 each
.jsonl                 in each line an object whose "text" (or "content") is a text
.parquet               a column "text", as data sets of texts on the Hugging Face hub have them
.npy                   one dimension of integers: tokens already, joined as they are, up to the largest one

    texts       "ab"  "c"  "de"            window = 2
    stream      a b . c . d e .            . ends a text
    windows     a b .                      inputs a b, labels b .
                    . c .                  inputs . c, labels c .
                        . d e              inputs . d, labels d e

A window has n + 1 tokens, and its last one is the first of the next: each token but the stream's first is a label once.
At most n tokens at the end are left over.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from unisono.data.kinds import TEXT
from unisono.data.kinds.text import BYTES, TextOptions, Tokenizer, make_tokenizer, token_dtype
from unisono.data.sources import Source, Splits, reading, split_of, walk
from unisono.data.sources.tabular import TEXT_COLUMN
from unisono.errors import PackError

KEYS = ("text", "content")
"""Keys of a text in JSON."""

MAX_VOCABULARY = 1 << 20
"""Tokens of the largest vocabulary that there may be: larger numbers are something else."""


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


def find(path: Path, options: TextOptions) -> Splits:
    """Return the windows of each split of texts; empty if there are none. Raises PackError if they cannot be read."""
    streams = _streams(path, options)
    if set(streams) == {""}:
        whole, tokens = streams[""], streams[""].tokens
        cut = len(tokens) - len(tokens) // TEST_SHARE
        streams = {"train": whole._replace(tokens=tokens[:cut]), "test": whole._replace(tokens=tokens[cut:])}
    sources = {name: windows_source(stream, options.window, path, name) for name, stream in streams.items()}
    used = {file for stream in streams.values() for file in stream.files}
    endings = {".npy", *(ending for each, *_ in FORMATS for ending in each)}
    there = sorted(walk(path)) if sources and path.is_dir() else []
    others = [str(file.relative_to(path)) for file in there if file.suffix.lower() in endings and file not in used]
    return {name: replace(each, others=() if at else others) for at, (name, each) in enumerate(sources.items())}


def _streams(path: Path, options: TextOptions) -> dict[str, TokenStream]:
    """Return the tokens of each split of texts; empty if there are none."""
    if arrays := files_by_split(path, (".npy",), by_name=True):
        return _read_arrays(arrays, path, options)
    for endings, by_name, read in FORMATS:
        if splits := files_by_split(path, endings, by_name):
            tokenizer = make_tokenizer(options.tokenizer)
            return {
                name: TokenStream(join_texts(read(files), tokenizer), tokenizer.tokens, (*files, *tokenizer.files))
                for name, files in splits.items()
            }
    return {}


def join_texts(texts: Iterable[str], tokenizer: Tokenizer) -> NDArray[Any]:
    """Return the tokens of all texts, each followed by the one that ends it; empty texts are left out."""
    dtype, end = token_dtype(len(tokenizer.tokens)), [tokenizer.end_of_text]
    parts = [np.append(tokenizer.encode(text), end).astype(dtype) for text in texts if text]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def files_by_split(path: Path, endings: Sequence[str], by_name: bool) -> dict[str, list[Path]]:
    """Return the files with these endings, of each split; empty if there are none. Hidden files are left out.

    Any word of a file's name is its split where each file has one, and they differ; else the first one, both only
    `by_name` or where each file is a .txt. Raises PackError if only some files are in splits, or for a link to none.
    """
    if not path.is_dir():
        return {"": [path]} if path.suffix.lower() in endings else {}
    there = sorted(file for file in walk(path) if file.suffix.lower() in endings)
    files = [file for file in there if file.is_file()]
    if files and len(files) < len(there):
        broken = next(file for file in there if not file.is_file())
        raise PackError(f"{broken} is no file, or a link to none: restore it, or remove it")
    names = [file.relative_to(path).parts for file in files]
    splits = [_split_of(parts, words=None) for parts in names]
    texts = all(parts[-1].lower().endswith(".txt") for parts in names)  # train.py and test.py are programs
    if "" in splits or len(set(splits)) == 1 or not (by_name or texts):
        splits = [_split_of(parts, words=int(by_name)) for parts in names]
    found: dict[str, list[Path]] = {}
    for file, split in zip(files, splits, strict=True):
        found.setdefault(split, []).append(file)
    if len(found) > 1 and "" in found:
        others = ", ".join(sorted(set(found) - {""}))
        raise PackError(f"{path}: {found[''][0].name} is in no split, but others are in {others}; move it, or pack one")
    return found


def _split_of(parts: Sequence[str], words: int | None) -> str:
    """Return the split of a file with these names of folders and its own, of which so many words count; None: all."""
    return split_of((*parts[:-1][:1], *re.split(r"[-_.]", parts[-1])[:words]))


def windows_source(stream: TokenStream, window: int, path: Path, split: str) -> Source:
    """Return the windows of `window` labels in a stream. Raises PackError if it is too short for one."""
    tokens = stream.tokens
    count = (len(tokens) - 1) // window
    if count < 1:
        raise PackError(
            f"{path}: {split or 'the text'} has {len(tokens)} tokens, a window {window + 1}: give more text, "
            "or a smaller --window"
        )
    sizes = np.full(count, (window + 1) * tokens.itemsize, np.int64)
    keys = [f"{split or path.name}/{number}" for number in range(count)]

    def read(number: int) -> bytes:
        return tokens[number * window : (number + 1) * window + 1].tobytes()

    return Source(TEXT, stream.names, keys, np.zeros(count, np.int64), sizes, read, (window + 1,), stream.files)


def _read_arrays(splits: dict[str, list[Path]], path: Path, options: TextOptions) -> dict[str, TokenStream]:
    """Return the tokens of npy files. Raises PackError if they are no tokens, or a tokenizer is named."""
    if options.tokenizer != BYTES:
        raise PackError(f"{path} is tokenised already; leave --tokenizer {options.tokenizer} away")
    names = tuple(
        str(number) for number in range(1 + max(_largest(file) for files in splits.values() for file in files))
    )
    dtype = token_dtype(len(names))
    return {
        split: TokenStream(np.concatenate([np.load(file, mmap_mode="r").astype(dtype) for file in files]), names, files)
        for split, files in splits.items()
    }


def _largest(file: Path) -> int:
    """Return the largest token of a file. Raises PackError if its numbers are no tokens."""
    with reading(file, ValueError, EOFError):  # the last of an empty file
        tokens = np.load(file, mmap_mode="r")
    if not isinstance(tokens, np.ndarray):
        raise PackError(f"{file} holds several arrays: save one with numpy.save")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise PackError(f"{file} has {tokens.dtype} numbers of shape {tokens.shape}; tokens are integers, (tokens,)")
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= MAX_VOCABULARY:
        raise PackError(f"{file} has numbers from {least} to {largest}; tokens are from 0 to {MAX_VOCABULARY - 1:,}")
    return largest


def _read_files(files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of files in UTF-8."""
    for file in files:
        try:
            with reading(file):
                yield file.read_text(encoding="utf-8-sig")  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise PackError(f"{file} is no text in UTF-8: {error}; convert it, or move it elsewhere") from error


def _read_json_lines(files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of JSON lines."""
    for file in files:
        with reading(file), file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if content := line.removeprefix(BOM_UTF8).strip():
                    yield _text(content, file, number)


def _text(line: bytes, file: Path, number: int) -> str:
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise PackError(f"{file}: line {number} is no JSON in UTF-8: {reason}; mend the line, or remove it") from error
    found = next((content[key] for key in KEYS if key in content), None) if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise PackError(f"{file}: line {number} has no text in {' or '.join(KEYS)}")
    return found


def _read_tables(files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of all files, a batch of rows in memory at once; rows without a text are left out."""
    for file in files:
        with reading(file, pa.ArrowInvalid):
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if TEXT_COLUMN not in names or not _is_text(table.schema_arrow.field(TEXT_COLUMN).type):
                raise PackError(
                    f"{file} has the columns {', '.join(names)}; it needs one of strings named {TEXT_COLUMN!r}"
                )
            for rows in table.iter_batches(columns=[TEXT_COLUMN]):
                yield from (text for text in rows.column(0).to_pylist() if text)


def _is_text(kind: pa.DataType) -> bool:
    """Return True for columns of strings, as Arrow, polars (large) and pandas (categories) write them."""
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


FORMATS: tuple[tuple[tuple[str, ...], bool, Callable[[Sequence[Path]], Iterable[str]]], ...] = (
    ((".jsonl",), True, _read_json_lines),
    ((".parquet",), True, _read_tables),
    ((".txt", ".md", ".rst", ".py"), False, _read_files),
)
"""Endings of files of texts; True if a word of a file's name alone may be its split; the reader."""
