"""Texts: windows of tokens, each with the next one as its label (`sources/texts.py` cuts them).

    bytes             "für"  ─▶  102 195 188 114                 256 tokens: the bytes of UTF-8; 0 ends a text
    tokenizer.json    "für"  ─▶  69 30603                        as Hugging Face's `tokenizers` reads it

Byte 0 occurs in no usual text, so it is free to end one. In a pack a window is (n + 1) numbers of 2 bytes,
little-endian, or of 4 for more than 65,536 tokens: the inputs are the first n, the labels the last n.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.kinds import SampleKind, SampleTransform
from unisono.data.order import CounterRNG
from unisono.errors import DecodeError, PackError, UsageError, install_command

if TYPE_CHECKING:
    import torch

    from unisono.data.options import DataOptions
    from unisono.data.pack.index import Index


END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of the token that ends a text, in `tokenizer.json` files; the first that a file has is taken."""


class ByteTokenizer:
    """The bytes of UTF-8 as tokens."""

    tokens: tuple[str, ...] = tuple(repr(bytes([byte]))[2:-1] for byte in range(256))
    """Names of the tokens, by number."""
    end_of_text = 0
    """Token that ends each text."""
    files: tuple[Path, ...] = ()
    """Files that it is read from."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the bytes of a text; half of a surrogate pair, which is no text, becomes a question mark."""
        return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; those that are no character become the replacement character."""
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
        names = {token_id: name for name, token_id in number_of.items()}
        numbers = range(max(names, default=-1) + 1)
        self.tokens, self.files = tuple(names.get(token_id, f"unused {token_id}") for token_id in numbers), (path,)
        end = next((name for name in END_OF_TEXT if name in number_of), None)
        if end is None:
            raise PackError(
                f"--tokenizer {path} has no token that ends a text, none of {', '.join(END_OF_TEXT)}: add one"
            )
        self.end_of_text: int = number_of[end]

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the tokens of a text; half of a surrogate pair, which is no text, becomes a question mark."""
        encodable = text.encode(errors="replace").decode()
        return np.array(self._library.encode(encodable, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with the names of those that are no text, such as the end of one."""
        text: str = self._library.decode(list(tokens), skip_special_tokens=False)
        return text


Tokenizer = ByteTokenizer | FileTokenizer
"""Conversion between texts and numbers from 0 to len(tokens) - 1."""


def make_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes", or that of a `tokenizer.json`. Raises UsageError or PackError."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name))


BYTES = "bytes"
"""Name of the tokenizer whose tokens are bytes."""


@dataclass(frozen=True)
class TextOptions:
    """Options with which texts are tokenised and cut into samples."""

    window: int = 128
    """Tokens of a sample, each of which has the next one as its label."""
    tokenizer: str = BYTES
    """"bytes", or the path of a `tokenizer.json` of Hugging Face's `tokenizers`."""


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the number format of tokens in a pack."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


class TextTransform:
    """Transform of windows with `tokens` labels of a vocabulary, for one thread."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self.shape = (2, tokens)
        self._dtype = token_dtype(vocabulary)

    def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:  # noqa: ARG002  as it is
        """Convert one window into `out`, (2, tokens). Raises DecodeError if it has another number of bytes."""
        expected = (self.shape[1] + 1) * self._dtype.itemsize
        if len(file) != expected:
            raise DecodeError(f"a window of {self.shape[1] + 1} tokens has {expected} bytes, this one {len(file)}")
        window, memory = np.frombuffer(file, self._dtype), out.numpy()
        memory[0], memory[1] = window[:-1], window[1:]

    @staticmethod
    def batch(memory: torch.Tensor) -> torch.Tensor:
        """Return the inputs of a batch, (samples, tokens)."""
        return memory[:, 0]


class TextKind(SampleKind):
    """Windows of tokens. The pack's shape is (n + 1,), its classes are the vocabulary."""

    plural = "windows of text"
    column = "tokens"
    class_words = "tokens"
    labels_are_tokens = True
    class_remedy = "pack texts with the same --tokenizer"

    def transform(self, index: Index, options: DataOptions) -> Callable[[], SampleTransform]:  # noqa: ARG002
        return partial(TextTransform, self.labels_per_sample(index.about.shape), len(index.about.classes))

    def labels_per_sample(self, shape: tuple[int, ...] | None) -> int:
        """Return n for windows of n + 1 tokens."""
        assert shape is not None, "windows have a shape"
        return shape[0] - 1

    def bytes_per_label(self, classes: tuple[str, ...]) -> int | None:
        """Return 1 if tokens are bytes."""
        return 1 if classes == ByteTokenizer.tokens else None

    def labels(self, memory: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  a window has its own
        """Return the tokens that follow the inputs, (samples, n)."""
        return memory[:, 1]
