"""Tokenizers: texts to numbers, and back.

    bytes             "für"  ─▶  102 195 188 114                 256 tokens: the bytes of UTF-8; 0 ends a text
    tokenizer.json    "für"  ─▶  69 30603                        as Hugging Face's `tokenizers` reads it

Byte 0 occurs in no usual text, so it is free to end one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.data.text.options import BYTES
from unisono.errors import PackError, UsageError, install_command

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of the token that ends a text, in `tokenizer.json` files; the first that a file has is taken."""


class Tokenizer(Protocol):
    """Conversion between texts and numbers from 0 to len(tokens) - 1."""

    tokens: tuple[str, ...]
    """Names of the tokens, by number."""
    end_of_text: int
    """Token that ends each text."""
    files: tuple[Path, ...]
    """Files that it is read from."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the tokens of a text, without one that ends it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are no character become the replacement character."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8 as tokens."""

    tokens: tuple[str, ...] = tuple(repr(bytes([byte]))[2:-1] for byte in range(256))
    end_of_text = 0
    files: tuple[Path, ...] = ()

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the bytes of a text; half of a surrogate pair, which is no text, becomes a question mark."""
        return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """Tokenizer of a `tokenizer.json`, by Hugging Face's `tokenizers` (the extra `text`)."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises UsageError without the package, PackError if the file is no tokenizer."""
        if find_spec("tokenizers") is None:
            raise UsageError(f"--tokenizer {path} needs tokenizers: {install_command('text')}; or use {BYTES}")
        from tokenizers import Tokenizer as Library  # noqa: PLC0415  of the extra `text`

        try:
            content = path.read_text(encoding="utf-8")
            known = "model" in json.loads(content)
        except (OSError, ValueError, TypeError) as error:
            raise PackError(f"--tokenizer {path}: {getattr(error, 'strerror', None) or error}") from error
        if not known:
            raise PackError(f"--tokenizer {path} is no tokenizer.json: it has no model")
        try:
            self._library = Library.from_str(content)
        except Exception as error:  # the library raises no narrower one
            raise PackError(f"--tokenizer {path} is no tokenizer.json of this library: {error}") from error
        self._library.no_truncation()  # a file may have those of a model's inputs: texts would lose their ends
        self._library.no_padding()
        number_of = self._library.get_vocab()
        names = {number: name for name, number in number_of.items()}
        numbers = range(max(names, default=-1) + 1)
        self.tokens: tuple[str, ...] = tuple(names.get(number, f"unused {number}") for number in numbers)
        ends = [number_of[name] for name in END_OF_TEXT if name in number_of]
        if not ends:
            raise PackError(
                f"--tokenizer {path} has no token that ends a text, none of {', '.join(END_OF_TEXT)}: add one"
            )
        self.end_of_text = ends[0]
        self.files: tuple[Path, ...] = (path,)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the tokens of a text; half of a surrogate pair, which is no text, becomes a question mark."""
        whole = text.encode(errors="replace").decode()
        return np.array(self._library.encode(whole, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with the names of those that are no text, such as the end of one."""
        found: str = self._library.decode(list(tokens), skip_special_tokens=False)
        return found


def make_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes", or that of a `tokenizer.json`. Raises UsageError or PackError."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name))
