"""Interval and scope of the shuffle: how often samples move between all ranks, and how far they move in between.

    "epoch"             every epoch, a new permutation of the whole set
    "every:4"           every 4 epochs; in between each rank sees its own samples in new orders
    "every:4,parts:2"   every 4 epochs; in between samples stay in their half of each batch: that of half of the ranks
    "once"              in the first epoch only

Parts are those of the batch, not of the ranks, so the order of samples is the same on any number of ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unisono.errors import RecipeError

FORM = re.compile(r"(?P<interval>epoch|once|every:(?P<every>[1-9]\d{0,8}))(,parts:(?P<parts>[1-9]\d{0,8}))?", re.ASCII)


@dataclass(frozen=True)
class ShuffleOptions:
    """Interval and scope of the shuffle."""

    every: int = 1
    """Epochs from one shuffle between all ranks to the next; 0: only the first epoch has one."""
    parts: int = 0
    """Equal parts of each batch in which samples stay in between; 0: as many as the batch has samples."""

    def __str__(self) -> str:
        interval = {0: "once", 1: "epoch"}.get(self.every, f"every:{self.every}")
        return f"{interval},parts:{self.parts}" if self.parts else interval

    def first_epoch(self, epoch: int) -> int:
        """Return the epoch of the last shuffle between all ranks, up to `epoch`.

        >>> [ShuffleOptions(every=3).first_epoch(epoch) for epoch in range(7)]
        [0, 0, 0, 3, 3, 3, 6]
        """
        return epoch - epoch % self.every if self.every else 0


def parse_shuffle(text: str) -> ShuffleOptions:
    """Return the options that a recipe's `data.shuffle` names. Raises RecipeError for other words.

    >>> parse_shuffle("every:4,parts:2")
    ShuffleOptions(every=4, parts=2)
    """
    found = FORM.fullmatch(text)
    every = 0 if found is None or found["interval"] == "once" else int(found["every"] or 1)
    if found is None or (every == 1 and found["parts"]):
        raise RecipeError(
            f'data.shuffle = "{text}"; it is "epoch", "every:N" or "once", the last two perhaps with ",parts:P", as in '
            '"every:4,parts:2"'
        )
    return ShuffleOptions(every, int(found["parts"] or 0))
