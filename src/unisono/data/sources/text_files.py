"""Text files in UTF-8: a file, or all in a folder and in the folders below, each a text.

corpus/a.txt   corpus/b/c.md   corpus/d.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from unisono.data.sources.text_windows import files_by_split, tokenised
from unisono.data.text.options import TextOptions
from unisono.data.text.windows import TokenStream
from unisono.errors import PackError

ENDINGS = (".txt", ".md", ".rst", ".py")


def find(path: Path, options: TextOptions) -> dict[str, TokenStream] | None:
    """Return the tokens of each split of text files; None if there are none."""
    return tokenised(files_by_split(path, ENDINGS, by_name=False), _texts, options)


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text(encoding="utf-8-sig")  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise PackError(f"{file} is no text in UTF-8: {error}; convert it, or move it elsewhere") from error
        except OSError as error:
            raise PackError(f"cannot read {file}: {error.strerror}") from error
