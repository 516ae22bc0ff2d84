"""Control word of a step: ranks share samples and requests in one small sum, before their gradients are averaged.

    rank 0   said 8 samples            ─▶ [8, 1, 0, ..., 0, 0]  ┐
    rank 1   said 5 samples, "save"    ─▶ [5, 1, 0, ..., 1, 0]  ┼ sum ─▶ 13 samples, 2 ranks said; {"save"}
    rank 2   has no batch: absent      ─▶ [0, 0, 0, ..., 0, 0]  ┘        weights 8/13, 5/13, 0

Every rank decodes the same sum, so all find the same weights, the same error and the same requests. Each rank is named
by one bit, so names add up without a carry. First dimensions x differ where n * sum(x * x) is not sum(x) ** 2 (Cauchy
and Schwarz), so a sum shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import UsageError

KINDS = ("save", "stop")
"""Kinds of requests that a rank can make of all ranks."""

FIELDS = 5 + 2 * len(KINDS)
"""Number of fields before those that name ranks."""

BITS = 48
"""Ranks that one number names: a float64 holds integers up to 2**53 exactly."""

EXACT = 2.0**53


@dataclass(frozen=True)
class Word:
    """Part of the control word that one rank contributes."""

    samples: float | None = None
    """Samples that its loss is a mean of, as given by the program; None where none were given."""
    absent: bool = False
    """True where the rank has no gradients in this step and gave no samples: its weight is 0."""
    first: int | None = None
    """First dimension of its last input, where one was seen. Used for a warning only."""
    requests: frozenset[str] = frozenset()

    @property
    def said(self) -> bool:
        """True where the program has given the number of samples."""
        return self.samples is not None

    @property
    def contributes(self) -> bool:
        """True where the rank's gradients count: it is not absent, and did not give 0 samples."""
        return self.samples != 0 and not self.absent


@dataclass(frozen=True)
class Agreed:
    """Control word of a step, as all ranks have it."""

    samples: float
    """Number of samples of all ranks."""
    said: int
    """Number of ranks that gave their samples."""
    unsaid: tuple[int, ...]
    """Ranks that have gradients but gave no samples."""
    uneven: bool
    """True where the inputs' first dimensions are known to differ."""
    requests: Mapping[str, str]
    """Kinds that were requested, each with its origin: "rank 2", or "3 ranks"."""

    def weight_of(self, word: Word) -> float:
        """Return the factor of a rank's gradients in the average: its share of samples, or 1/n where no rank gave
        any."""
        if not word.contributes:
            return 0.0
        if word.samples is None:
            return 1.0 / len(self.unsaid)
        return word.samples / self.samples

    def error(self) -> UsageError | None:
        """Return the error of all ranks where only some have given their samples; else None."""
        if not self.said or not self.unsaid:
            return None
        one = len(self.unsaid) == 1
        return UsageError(
            f"{_names(self.unsaid)} {'has' if one else 'have'} not said how many samples the loss is a mean of, "
            f"{self.said} other rank{'s' if self.said > 1 else ''} {'have' if self.said > 1 else 'has'}: call "
            "unisono.add_samples(model, n) before backward() on every rank, or on none"
        )


def check_samples(samples: float) -> float:
    """Return a number of samples. Raises UsageError for one that is negative or not finite."""
    if not math.isfinite(samples) or samples < 0:
        raise UsageError(f"unisono.add_samples(model, {samples}): a number of samples is finite, and 0 or more")
    return float(samples)


def check_request(kind: str) -> str:
    """Return a kind of request. Raises UsageError for an unknown one."""
    if kind not in KINDS:
        raise UsageError(f"there is no request {kind!r}; there are {', '.join(KINDS)}")
    return kind


def encode(word: Word, rank: int, size: int) -> list[float]:
    """Return a rank's word as numbers, to be summed over all `size` ranks."""
    unsaid = not word.said and not word.absent
    first = float(word.first) if unsaid and word.first is not None else None
    names = [0.0] * -(-size // BITS)
    if unsaid:
        names[rank // BITS] = 2.0 ** (rank % BITS)
    return [
        word.samples or 0.0,
        float(word.said),
        float(first is not None),
        first or 0.0,
        (first or 0.0) ** 2,
        *(float(kind in word.requests) for kind in KINDS),
        *(float(kind in word.requests) * rank for kind in KINDS),
        *names,
    ]


def decode(sums: Sequence[float]) -> Agreed:
    """Return the words of all ranks, decoded from the sums of their numbers."""
    samples, said, known, total, squares = sums[:5]
    unsaid = [
        place * BITS + bit
        for place, names in enumerate(map(int, sums[FIELDS:]))
        if names
        for bit in range(BITS)
        if names >> bit & 1
    ]
    uneven = known * squares < EXACT and known * squares != total * total
    counts, ranks = sums[5 : 5 + len(KINDS)], sums[5 + len(KINDS) : FIELDS]
    asked = zip(KINDS, counts, ranks, strict=True)
    requests = {kind: asked_by(count, total_rank) for kind, count, total_rank in asked if count}
    return Agreed(samples, int(said), tuple(unsaid), uneven, requests)


def asked_by(count: float, ranks: float) -> str:
    """Return the origin of a request in words: `count` ranks made it, and their numbers have the sum `ranks`."""
    return f"rank {ranks:.0f}" if count == 1 else f"{count:.0f} ranks"


def warning_of(agreed: Agreed, before: bool) -> str | None:
    """Return the warning where no rank gave its samples although they seem to differ; else None.

    `before`: True where ranks gave samples for an earlier average.
    """
    if agreed.said or len(agreed.unsaid) < 2 or not (agreed.uneven or before):
        return None
    reason = (
        "the first dimensions of the ranks' inputs differ"
        if agreed.uneven
        else "samples were said for an earlier average, and count for that one alone"
    )
    return (
        f"{reason}, but no rank has said how many samples its loss is a mean of, so that all ranks weigh the same: "
        "call unisono.add_samples(model, n) before each backward(), on every rank"
    )


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
