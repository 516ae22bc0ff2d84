"""JSON lines: in each line an object whose "text" (or "content") is a text.

{"text": "It was a dark night.", "source": "a book"}
{"text": "def f(x): ..."}
"""

from __future__ import annotations

import json
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
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _text(json.loads(line), file, number)
        except (OSError, ValueError) as error:
            raise PackError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def _text(content: object, file: Path, number: int) -> str:
    found = next((content[key] for key in KEYS if key in content), None) if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise PackError(f"{file}: line {number} has no text in {' or '.join(KEYS)}")
    return found
