"""A figure of a paper beside ours, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WITHIN = 0.15
"""Largest difference to a paper's figure that is not explained by a reason."""

DIGITS = 4
"""Significant digits of the results."""


@dataclass(frozen=True)
class SeedFigure:
    """Figure of a paper, and what the project's functions give for it."""

    system: str
    place: str
    """Section, table or figure of the paper."""
    quantity: str
    theirs: float
    ours: float | None
    """None where an input is missing."""
    assumptions: tuple[str, ...] = ()
    """Inputs that are in no paper."""
    reason: str = ""
    """Reason why ours is missing, or differs."""
    upper_bound: bool = False
    """True where the paper says "at most"."""
    predicted: bool = True
    """False where two figures of the paper are held against each other."""

    @property
    def difference(self) -> float | None:
        """Ours over theirs, less 1."""
        return None if self.ours is None else self.ours / self.theirs - 1

    @property
    def close(self) -> bool:
        """True within 15%, or below an upper bound."""
        if self.upper_bound and self.ours is not None:
            return self.ours <= self.theirs
        return self.difference is not None and abs(self.difference) <= WITHIN


def as_json(figures: Sequence[SeedFigure]) -> list[dict[str, Any]]:
    """Return the figures as data, ours with few digits."""
    return [{**asdict(one), "ours": None if one.ours is None else float(f"{one.ours:.{DIGITS}g}")} for one in figures]


def as_markdown(figures: Sequence[SeedFigure]) -> str:
    """Return the table, and the assumptions and reasons below it by number."""
    notes: list[str] = []

    def number(note: str) -> str:
        if note not in notes:
            notes.append(note)
        return str(1 + notes.index(note))

    lines = [
        "| system | place | quantity | theirs | ours | difference | notes |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for one in figures:
        marks = ", ".join(number(note) for note in (*one.assumptions, *([one.reason] if one.reason else [])))
        ours = "none" if one.ours is None else f"{one.ours:,.3g}" if one.ours < 1000 else f"{one.ours:,.0f}"
        difference = "" if one.difference is None else f"{one.difference:+.0%}"
        if one.upper_bound and one.close:
            difference = "below"
        lines.append(
            f"| {one.system} | {one.place} | {one.quantity} | {one.theirs:,} | {ours} | {difference} | {marks} |"
        )
    predicted = [one for one in figures if one.predicted]
    close = sum(one.close for one in predicted)
    return "\n".join(
        [
            *lines,
            "",
            f"{close} of {len(predicted)} predicted figures are within {WITHIN:.0%} or below the paper's bound. Notes:",
            "",
            *(f"{place}. {note}" for place, note in enumerate(notes, 1)),
        ]
    )
