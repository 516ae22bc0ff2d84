"""Collective calls in words, and as numbers that ranks compare: calls with equal words are the same."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

MAX_CALLS = 1 << 61
"""Number of distinct call numbers: two of them plus a sequence number are below 2^63."""

WORDS_BYTES = 512
"""Bytes per rank for the description of its call, shown in mismatch errors."""


class Call(NamedTuple):
    """Collective call in words, and as a number below MAX_CALLS that ranks compare."""

    words: str
    number: int


def call_of(words: str) -> Call:
    """Return the call that is described by `words`; ranks that pass the same words make the same call."""
    return Call(words, int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") % MAX_CALLS)


def encode_words(call: Call) -> bytes:
    """Return the words of a call in WORDS_BYTES bytes; in longer ones the call's number replaces the middle."""
    words = call.words.encode()
    if len(words) > WORDS_BYTES:
        middle = f" ... (call {call.number:016x}) ... ".encode()
        half = (WORDS_BYTES - len(middle)) // 2
        words = words[:half] + middle + words[-half:]
    return words.ljust(WORDS_BYTES)


def decode_words(encoded: bytes) -> str:
    """Return the words that `encode_words` has encoded."""
    return encoded.decode(errors="replace").strip()
