"""Sizes and times on the command line: 4KiB, 64MB, 30us, 2.5ms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from unisono.errors import UsageError

BYTES: Mapping[str, int] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
SECONDS: Mapping[str, int | Fraction] = {
    "": 1,
    "s": 1,
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}

MAX_DIGITS = 18
"""Largest number of digits of a whole number."""

MAX_BYTES = 1 << 60
"""Largest size."""

MAX_SECONDS = 10**9
"""Largest time."""


def check_most(option: str, number: int, most: int) -> None:
    """Raise UsageError for a number above the limit of an option."""
    if number > most:
        raise UsageError(f"--{option} {number:,}: the limit is {most:,}")


def parse_bytes(text: str, option: str = "--bytes ") -> int:
    """Return a size in bytes; kB, MB and GB are powers of 1000, KiB, MiB and GiB of 1024. `option` stands before it.

    >>> parse_bytes("1.5KiB")
    1536

    Raises UsageError for any other form, for a part of a byte, and for more than 1 EiB.
    """
    value = _parse(text, BYTES)
    if value is None or value.denominator != 1 or not value:
        raise UsageError(f"{option}{text}: write sizes like 4096, 4KiB or 64MB, of whole bytes")
    if value > MAX_BYTES:
        raise UsageError(f"{option}{text}: the limit is 1 EiB, 2^60 bytes")
    return int(value)


def parse_seconds(text: str, option: str) -> float:
    """Return a time in seconds; without a unit, the number is seconds. `option` is what stands before it.

    >>> parse_seconds("30us", "--latency ")
    3e-05

    Raises UsageError for any other form, and for more than 30 years.
    """
    value = _parse(text, SECONDS)
    if value is None:
        raise UsageError(f"{option}{text}: write a time like 30us, 2.5ms or 0.01s")
    if value > MAX_SECONDS:
        raise UsageError(f"{option}{text}: the limit is {MAX_SECONDS:,} s")
    return float(value)


def _parse(text: str, units: Mapping[str, int | Fraction]) -> Fraction | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    return None if match is None or match[2] not in units else Fraction(match[1]) * units[match[2]]
