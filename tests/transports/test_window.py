from hypothesis import given
from hypothesis import strategies as st

from unisono.transports.window import (
    MARGIN_DIVISOR,
    MAX_SLOT_BYTES,
    MIN_SLOT_BYTES,
    SLOTS_DIVISOR,
    SLOTS_PER_RANK,
    plan_slot,
    shortage_message,
)

MEGABYTE = 1 << 20


def test_slots_have_maximum_size_with_much_or_unknown_memory() -> None:
    assert plan_slot(1 << 40, 128) == MAX_SLOT_BYTES
    assert plan_slot(None, 128) == MAX_SLOT_BYTES


def test_docker_with_8_ranks() -> None:
    """MPICH takes 43.4 MB of the 64 for itself."""
    free = 64 * MEGABYTE - 43_400_000
    worlds = 0
    while slot := plan_slot(free, 8, 12 << 10):
        assert MIN_SLOT_BYTES <= slot <= 256 << 10
        free -= 8 * (SLOTS_PER_RANK * slot + (12 << 10))
        worlds += 1
    assert worlds >= 8, "a program has as many process groups"


@given(st.integers(0, 1 << 33), st.integers(1, 256), st.integers(0, 1 << 20))
def test_slots_never_exceed_free_memory(free: int, ranks: int, other_bytes: int) -> None:
    slot = plan_slot(free, ranks, other_bytes)
    need = ranks * (SLOTS_PER_RANK * slot + other_bytes)
    if not slot:
        assert ranks * (SLOTS_PER_RANK * MIN_SLOT_BYTES + other_bytes) > free - free // MARGIN_DIVISOR
        return
    assert slot & (slot - 1) == 0
    assert MIN_SLOT_BYTES <= slot <= MAX_SLOT_BYTES
    assert need <= free - free // MARGIN_DIVISOR
    assert slot == MIN_SLOT_BYTES or need <= free / SLOTS_DIVISOR
    assert plan_slot(2 * free, ranks, other_bytes) >= slot


def test_shortage_message_names_the_remedy() -> None:
    message = shortage_message("node-a", "/dev/shm", 3_000_000, 50_000_000, "they send messages")
    assert message == (
        "unisono: /dev/shm of node-a has 3.0 MB free, and the ranks would take 50.0 MB: they send messages. Remedy: a "
        "larger /dev/shm: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
    )
