"""Choice of the cut from which a run resumes: the newest that all who trained have left a snapshot for.

    centres        412      450      455            kept: the newest three
    worker 0       412      450      455
    worker 1       412                              it had not come since 412 when the run was killed

450 and 455 would let worker 1 begin at the centre, without state of its optimizer; so 412 is chosen. Where no kept
centre has all snapshots, since a worker was stopped for long, it is the newest.

Of each worker the newest three snapshots are kept, as of the centres: the snapshot of a kept centre is there unless
later centres are still being written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def cuts_to_try(cuts: Mapping[int, Collection[int]], snapshots: Sequence[Collection[int]]) -> list[int]:
    """Return the cuts in the order in which a run tries to resume from them.

    `cuts` has the workers that trained at the cut of each stored centre; `snapshots` the cuts for which each worker has
    left one.

    >>> cuts_to_try({412: [0, 1], 450: [0, 1], 455: [0, 1]}, [[412, 450, 455], [412]])
    [412, 455, 450]
    """
    newest = sorted(cuts, reverse=True)
    whole = [cut for cut in newest if all(cut in snapshots[worker] for worker in cuts[cut])]
    return whole + [cut for cut in newest if cut not in whole]


def dead_before(events: Iterable[Mapping[str, Any]], number: int) -> set[int]:
    """Return the workers that had died before exchange `number`, and had not come back."""
    dead = set[int]()
    for event in events:
        if "died" in event and event["number"] <= number:
            dead.add(event["died"])
        elif "worker" in event and event["number"] < number:
            dead.discard(event["worker"])
    return dead
