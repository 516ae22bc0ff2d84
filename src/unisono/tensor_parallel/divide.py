"""Equal shares of a layer's features, or the group sizes that would give them."""

from __future__ import annotations


def uneven(count: int, what: str, ranks: int) -> str | None:
    """Return the reason where `ranks` ranks cannot share `count` features evenly, with sizes that can; else None.

    >>> uneven(10, "output features", 4)
    'has 10 output features, which 4 ranks cannot share evenly: groups of 2, 5, 10 ranks can'
    """
    if count % ranks == 0:
        return None
    fits = [str(size) for size in range(2, count + 1) if count % size == 0][:6]
    return f"has {count} {what}, which {ranks} ranks cannot share evenly: groups of {', '.join(fits)} ranks can"
