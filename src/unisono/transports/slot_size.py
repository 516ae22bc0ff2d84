"""Size of the shared memory that the ranks of a node may use, decided before a window is made.

/dev/shm promises memory that it may not have: a window of any size is made without an error, and the rank that first
touches a page without memory is killed by SIGBUS. Docker's /dev/shm has 64 MB, of which 8 ranks of MPICH take 43 MB at
start, and a world, each process group and the memory of gradients have windows:

    free   ├── slots of this world ──┤──────────── gradients, other worlds, loaders ────────────┤
           0     1/SLOTS_DIVISOR = 1/4                                                             1

`transports/reserve.py` finds the free memory and allocates it.
"""

from __future__ import annotations

MAX_SLOT_BYTES = 2 << 20
"""Largest slot in bytes: barriers then take negligible time; 0.25 to 4 MB were within a third of each other."""

MIN_SLOT_BYTES = 64 << 10
"""Smallest slot in bytes: with smaller ones messages are as fast."""

SLOTS_PER_RANK = 3
"""Number of slots of a rank."""

SLOTS_DIVISOR = 4
"""Divisor of the free memory: the slots of a world take at most this part, because more worlds may follow."""

MARGIN_DIVISOR = 8
"""Divisor of the free memory for the part that is left to others."""


def plan_slot(free: int | None, ranks: int, other_bytes: int = 0) -> int:
    """Return the bytes of a slot for `ranks` ranks of a node with `free` bytes of shared memory; 0: use messages.

    `other_bytes` is the number of bytes that each rank needs besides its slots; `free` is None if unknown. A slot is a
    power of two, as large as its share of the free memory allows; the smallest one may take more than its share.

    >>> plan_slot(24_000_000, 8), plan_slot(3_000_000, 8), plan_slot(1_000_000, 8)
    (131072, 65536, 0)
    """
    if free is None:
        return MAX_SLOT_BYTES

    def bytes_needed(slot: int) -> int:
        return ranks * (SLOTS_PER_RANK * slot + other_bytes)

    slot = MAX_SLOT_BYTES
    while slot > MIN_SLOT_BYTES and bytes_needed(slot) > free // SLOTS_DIVISOR:
        slot //= 2
    return slot if fits(free, bytes_needed(slot)) else 0


def fits(free: int | None, nbytes: int) -> bool:
    """Return True if windows of `nbytes` bytes together leave a margin of the `free` bytes of shared memory.

    >>> fits(64_000_000, 50_000_000), fits(64_000_000, 60_000_000)
    (True, False)
    """
    return free is None or nbytes <= free - free // MARGIN_DIVISOR


def shortage_message(host: str, folder: str, free: int | None, bytes_needed: int, consequence: str) -> str:
    """Return the line that reports a shortage: free and needed memory, the consequence, and the remedy."""
    found = "too little memory" if free is None else f"{_megabytes(free)} free"
    return (
        f"unisono: {folder} of {host} has {found}, and the ranks would take {_megabytes(bytes_needed)}: {consequence}. "
        f"Remedy: a larger {folder}: docker run --shm-size=1g, or mount -o remount,size=1g {folder}"
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
