"""Sizes and times in words, and tables of text or in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def format_bytes(nbytes: float) -> str:
    """Return a size in the largest binary unit of which it has at least one.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.4g} B"


def format_seconds(seconds: float) -> str:
    """Return a time with four digits, in the largest unit of which it has at least one.

    >>> format_seconds(0.0123456)
    '12.35 ms'
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds / 1e-6:.4g} µs"


def format_duration(seconds: float) -> str:
    """Return the time of a run.

    >>> format_duration(12.34), format_duration(95), format_duration(4000)
    ('12.3 s', '1:35 min', '1:06:40 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return the lines of a table in Markdown. Columns with these numbers are aligned left, all others right."""
    marks = ["---" if number in left else "---:" for number in range(len(header))]
    return [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in (header, marks, *rows)]


def text_table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> Iterator[str]:
    """Yield a line for each row; the cells of the columns `left` begin at the left, all others end at the right.

    >>> list(text_table([("a", "b"), ("long", "10")], left=[0]))
    ['a      b', 'long  10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in cells).rstrip()
