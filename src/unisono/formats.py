"""Sizes, times and rates as text, written and read: 4KiB, 64MB, 30us, 2.5ms, 200mbit; tables of text or in Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

from unisono.errors import UsageError

Row = TypeVar("Row")


def format_bytes(nbytes: float) -> str:
    """Return a size in the largest binary unit of which it has at least one.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    return _in_largest(nbytes, (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def format_seconds(seconds: float) -> str:
    """Return a time with four digits, in the largest unit of which it has at least one.

    >>> format_seconds(0.0123456)
    '12.35 ms'
    """
    return _in_largest(seconds, (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def _in_largest(value: float, *units: tuple[float, str]) -> str:
    size, name = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{value / size:.4g} {name}"


def format_duration(seconds: float) -> str:
    """Return the time of a run.

    >>> format_duration(12.34), format_duration(95), format_duration(4000)
    ('12.3 s', '1:35 min', '1:06:40 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def counted(count: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return the lines of a table in Markdown. Columns with these numbers are aligned left, all others right."""
    marks = ["---" if index in left else "---:" for index in range(len(header))]
    return [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in (header, marks, *rows)]


def column_table(
    columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row], left: Collection[int] = ()
) -> Iterator[str]:
    """Yield a line for the heads of the columns, and one for each row with its cells, as `text_table`."""
    heads = [head for head, _ in columns]
    yield from text_table([heads, *([cell(row) for _, cell in columns] for row in rows)], left)


def text_table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> Iterator[str]:
    """Yield a line for each row; the cells of the columns `left` begin at the left, all others end at the right.

    >>> list(text_table([("a", "b"), ("long", "10")], left=[0]))
    ['a      b', 'long  10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in cells).rstrip()


BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
SECONDS = {unit: Fraction(1, 1000**power) for unit, power in (("", 0), ("s", 0), ("ms", 1), ("us", 2), ("ns", 3))}

MAX_DIGITS = 18
"""Largest number of digits of a whole number."""

MAX_BYTES = 1 << 60
"""Largest size."""

MAX_SECONDS = 10**9
"""Largest time."""


def parse_bytes(text: str, option: str = "--bytes ") -> int:
    """Return a size in bytes; kB, MB and GB are powers of 1000, KiB, MiB and GiB of 1024. `option` stands before it.

    >>> parse_bytes("1.5KiB")
    1536

    Raises UsageError for any other form, for a part of a byte, and for more than 1 EiB.
    """
    value = parse_quantity(text, BYTES)
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
    value = parse_quantity(text, SECONDS)
    if value is None:
        raise UsageError(f"{option}{text}: write a time like 30us, 2.5ms or 0.01s")
    if value > MAX_SECONDS:
        raise UsageError(f"{option}{text}: the limit is {MAX_SECONDS:,} s")
    return float(value)


def parse_quantity(text: str, units: Mapping[str, int] | Mapping[str, Fraction]) -> Fraction | None:
    """Return a number with one of the units, times the unit; None for any other form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    return None if match is None or match[2] not in units else Fraction(match[1]) * units[match[2]]
