"""Descriptions of collective calls, and their digests, which ranks compare: equal descriptions are the same call."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_CALLS = 1 << 61
"""Number of distinct digests: two of them plus a sequence number are below 2^63."""

WORDS_BYTES = 512
"""Bytes per rank for the description of its call, shown in mismatch errors."""

MISMATCH_REMEDY = "every rank of a group must make the same calls in the same order"

_PLACE = re.compile(r" in (the dup's )*window \d+ from byte \d+|, whose algorithm is being chosen")
_ALGORITHM = re.compile(r"(?<=^allreduce)(\([^,]*), [^,)]*")


class Call(NamedTuple):
    """Collective call: its description in words, and the digest of that, below MAX_CALLS, which ranks compare."""

    description: str
    digest: int


def call_of(description: str) -> Call:
    """Return the call that is described by `description`; ranks that pass equal ones make the same call."""
    digest = int.from_bytes(hashlib.blake2b(description.encode(), digest_size=8).digest(), "little")
    return Call(description, digest % MAX_CALLS)


BARRIER = call_of("barrier()")


def labelled(call: Call, label: str) -> Call:
    """Return a call with a label, which ranks compare too; refusals keep one digest, whatever their words."""
    return Call(call.description + label, (call.digest + call_of(label).digest) % MAX_CALLS) if label else call


def call_to_choose(call: Call) -> Call:
    return call_of(f"{call.description}, whose algorithm is being chosen")


def call_in(call: Call, place: str) -> Call:
    """Return a call that is carried out in shared memory at `place`, the same on all ranks."""
    return call_of(f"{call.description} in {place}")


def differ_in_place(calls: Sequence[str]) -> bool:
    """Return True for descriptions of the same allreduce whose tensors lie in different places.

    The algorithm depends on the place, and without one it may have to be chosen first.
    """
    placed = any(_PLACE.search(description) for description in calls)
    return placed and len({_ALGORITHM.sub(r"\1", _PLACE.sub("", description)) for description in calls}) == 1


def difference(rank: int, description: str, other_rank: int, other_description: str) -> str:
    """Return the error message for two ranks in different calls."""
    return f"rank {rank} called {description}, but rank {other_rank} called {other_description}: {MISMATCH_REMEDY}"


def encode_words(call: Call) -> bytes:
    """Return the description of a call in WORDS_BYTES bytes; in a longer one the digest replaces the middle."""
    encoded = call.description.encode()
    if len(encoded) > WORDS_BYTES:
        middle = f" ... (call {call.digest:016x}) ... ".encode()
        half = (WORDS_BYTES - len(middle)) // 2
        encoded = encoded[:half] + middle + encoded[-half:]
    return encoded.ljust(WORDS_BYTES)


def decode_words(encoded: bytes) -> str:
    return encoded.decode(errors="replace").strip()
