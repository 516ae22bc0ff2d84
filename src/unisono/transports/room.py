"""Room in shared memory: how much of it the ranks of a node may plan with, decided before a window is made.

/dev/shm hands out memory that it may not have: a window of any size is made without a word, and the rank that first
touches a page for which there is no room is killed by SIGBUS. Docker's /dev/shm has 64 MB, 8 ranks of MPICH take 43 of
them before they do anything, and a world, each process group and the memory of gradients have windows:

    free   ├── slots of this world ──┤──────────── gradients, other worlds, loaders ────────────┤
           0          SLOTS_SHARE = 1/4                                                        1

`transports/reserve.py` asks for the room and takes it.
"""

from __future__ import annotations

LARGEST_SLOT = 2 << 20
"""Bytes of a slot where there is room: meetings then do not count; 0.25 to 4 MB were within a third of each other."""

LEAST_SLOT = 64 << 10
"""Bytes of the smallest slot: with smaller ones messages are as fast."""

SLOTS = 3
"""Slots of a rank."""

SLOTS_SHARE = 4
"""The slots of a world take one part in so many of what is free, since more worlds may come."""

MARGIN = 8
"""One part in so many of what is free is left to others."""


def plan_slot(free: int | None, ranks: int, beside: int = 0) -> int:
    """Bytes of a slot for `ranks` ranks of a node, whose shared memory has `free` bytes; 0: use messages.

    `beside` is what each rank needs besides its slots; `free` None is a system that does not say. A slot is as large
    as its share of the room allows, a power of two; the smallest one may take more than its share.

    >>> plan_slot(24_000_000, 8), plan_slot(3_000_000, 8), plan_slot(1_000_000, 8)
    (131072, 65536, 0)
    """
    if free is None:
        return LARGEST_SLOT

    def need(slot: int) -> int:
        return ranks * (SLOTS * slot + beside)

    slot = LARGEST_SLOT
    while slot > LEAST_SLOT and need(slot) > free // SLOTS_SHARE:
        slot //= 2
    return slot if has_room(free, need(slot)) else 0


def has_room(free: int | None, nbytes: int) -> bool:
    """Return True where windows of `nbytes` together leave a margin of the `free` bytes of a node's shared memory.

    >>> has_room(64_000_000, 50_000_000), has_room(64_000_000, 60_000_000)
    (True, False)
    """
    return free is None or nbytes <= free - free // MARGIN


def shortage(host: str, folder: str, free: int | None, need: int, instead: str) -> str:
    """The line that tells a shortage: what is free, what it does not hold, what is done instead, and the remedy."""
    found = "too little room" if free is None else f"{_megabytes(free)} free"
    return (
        f"unisono: {folder} of {host} has {found}, and the ranks would take {_megabytes(need)}: {instead}. Remedy: a "
        f"larger {folder}: docker run --shm-size=1g, or mount -o remount,size=1g {folder}"
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
