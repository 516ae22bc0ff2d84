"""The schedules: one algorithm a file, and the table of their names."""

from unisono.errors import UsageError
from unisono.schedules import direct, flat, halving, ring
from unisono.schedules.schedule import Family

SCHEDULES: dict[str, Family] = {
    "ring": Family(ring.ring, ring.part_reduce, ring.part_broadcast),
    "halving": Family(halving.halving),
    "direct": Family(direct.direct, direct.part_reduce, direct.part_broadcast),
    "flat": Family(flat.flat),
}


def find(name: str) -> Family:
    """The schedule called `name`. Raises UsageError, listing the names, when there is none."""
    if name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}; there are {', '.join(sorted(SCHEDULES))}")
    return SCHEDULES[name]
