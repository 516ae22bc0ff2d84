"""JSON lines: in each line an object whose "text" (or "content") is a text.

{"text": "It was a dark night.", "source": "a book"}
{"text": "def f(x): ..."}
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path

from unisono.data.sources.text_windows import files_by_split, tokenised
from unisono.data.text.options import TextOptions
from unisono.data.text.windows import TokenStream
from unisono.errors import PackError

ENDINGS = (".jsonl",)
KEYS = ("text", "content")


def find(path: Path, options: TextOptions) -> dict[str, TokenStream] | None:
    """Return the tokens of each split of JSON lines; None if there are none."""
    return tokenised(files_by_split(path, ENDINGS, by_name=True), _texts, options)


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if content := line.removeprefix(BOM_UTF8).strip():
                        yield _text(_parsed(content, file, number), file, number)
        except OSError as error:
            raise PackError(f"cannot read {file}: {error.strerror}") from error


def _parsed(line: bytes, file: Path, number: int) -> object:
    try:
        return json.loads(line.decode())
    except ValueError as error:
        reason = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise PackError(f"{file}: line {number} is no JSON in UTF-8: {reason}; mend the line, or remove it") from error


def _text(content: object, file: Path, number: int) -> str:
    found = next((content[key] for key in KEYS if key in content), None) if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise PackError(f"{file}: line {number} has no text in {' or '.join(KEYS)}")
    return found
