"""Collective calls in words, and as numbers that ranks compare: calls with equal words are the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_CALLS = 1 << 61
"""Number of distinct call numbers: two of them plus a sequence number are below 2^63."""

WORDS_BYTES = 512
"""Bytes per rank for the description of its call, shown in mismatch errors."""

MISMATCH_REMEDY = "every rank of a group must make the same calls in the same order"

_PLACE = re.compile(r" in (the dup's )*window \d+ from byte \d+|, whose algorithm is being chosen")
_ALGORITHM = re.compile(r"(?<=^allreduce)(\([^,]*), [^,)]*")


class Call(NamedTuple):
    """Collective call in words, and as a number below MAX_CALLS that ranks compare."""

    words: str
    number: int


def call_of(words: str) -> Call:
    """Return the call that is described by `words`; ranks that pass the same words make the same call."""
    return Call(words, int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") % MAX_CALLS)


def call_to_choose(call: Call) -> Call:
    return call_of(f"{call.words}, whose algorithm is being chosen")


def call_in(call: Call, place: str) -> Call:
    """Return a call that is carried out in shared memory at `place`, the same on all ranks."""
    return call_of(f"{call.words} in {place}")


def differ_in_place(calls: Sequence[str]) -> bool:
    """Return True for calls, in words, of the same allreduce whose tensors lie in different places.

    The algorithm depends on the place, and without one it may have to be chosen first.
    """
    placed = any(_PLACE.search(words) for words in calls)
    return placed and len({_ALGORITHM.sub(r"\1", _PLACE.sub("", words)) for words in calls}) == 1


def difference(one: int, words: str, other: int, other_words: str) -> str:
    """Return the error message for two ranks in different calls."""
    return f"rank {one} called {words}, but rank {other} called {other_words}: {MISMATCH_REMEDY}"


def encode_words(call: Call) -> bytes:
    """Return the words of a call in WORDS_BYTES bytes; in longer ones the call's number replaces the middle."""
    words = call.words.encode()
    if len(words) > WORDS_BYTES:
        middle = f" ... (call {call.number:016x}) ... ".encode()
        half = (WORDS_BYTES - len(middle)) // 2
        words = words[:half] + middle + words[-half:]
    return words.ljust(WORDS_BYTES)


def decode_words(encoded: bytes) -> str:
    return encoded.decode(errors="replace").strip()
