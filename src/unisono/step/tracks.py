"""Tracks: spans laid out so that no two overlap, each on the first track that is free.

spans      │── 1 ──│           track 0   │── 1 ──│── 3 ──│
               │── 2 ──│       track 1       │── 2 ──│
                   │── 3 ──│
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class TimeRange(Protocol):
    """Span of time."""

    @property
    def begin(self) -> float:
        """Seconds."""
        ...

    @property
    def end(self) -> float:
        """Seconds."""
        ...


Range = TypeVar("Range", bound=TimeRange)


def tracks(spans: Iterable[Range]) -> list[list[Range]]:
    """Return the spans by track, each in order of time. A span may begin when the one before it on its track ends."""
    found: list[list[Range]] = []
    for span in sorted(spans, key=lambda one: (one.begin, one.end)):
        free = next((track for track in found if track[-1].end <= span.begin), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found
