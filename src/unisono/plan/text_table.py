"""Tables of text: cells in columns, as wide as their longest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def text_table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> Iterator[str]:
    """Yield a line for each row; the cells of the columns `left` begin at the left, all others end at the right.

    >>> list(text_table([("a", "b"), ("long", "10")], left=[0]))
    ['a      b', 'long  10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in cells).rstrip()
