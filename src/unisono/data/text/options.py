"""Options with which texts are tokenised and cut."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = "bytes"
"""Name of the tokenizer whose tokens are bytes."""


@dataclass(frozen=True)
class TextOptions:
    """Options with which texts are tokenised and cut into samples."""

    window: int = 128
    """Tokens of a sample, each of which has the next one as its label."""
    tokenizer: str = BYTES
    """"bytes", or the path of a `tokenizer.json` of Hugging Face's `tokenizers`."""
