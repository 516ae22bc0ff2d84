from hypothesis import given
from hypothesis import strategies as st

from unisono.transports.room import (
    LARGEST_SLOT,
    LEAST_SLOT,
    MARGIN,
    SLOTS,
    SLOTS_SHARE,
    has_room,
    plan_slot,
    shortage,
)

MEGABYTE = 1 << 20


def test_slots_are_as_large_as_ever_where_there_is_room_or_nobody_says() -> None:
    assert plan_slot(1 << 40, 128) == LARGEST_SLOT
    assert plan_slot(None, 128) == LARGEST_SLOT


def test_docker_with_8_ranks() -> None:
    """MPICH takes 43.4 MB of the 64 for itself."""
    free = 64 * MEGABYTE - 43_400_000
    worlds = 0
    while slot := plan_slot(free, 8, 12 << 10):
        assert LEAST_SLOT <= slot <= 256 << 10
        free -= 8 * (SLOTS * slot + (12 << 10))
        worlds += 1
    assert worlds >= 8, "a program has as many process groups"


@given(st.integers(0, 1 << 33), st.integers(1, 256), st.integers(0, 1 << 20))
def test_slots_never_take_more_than_there_is(free: int, ranks: int, beside: int) -> None:
    slot = plan_slot(free, ranks, beside)
    need = ranks * (SLOTS * slot + beside)
    if not slot:
        assert ranks * (SLOTS * LEAST_SLOT + beside) > free - free // MARGIN
        return
    assert slot & (slot - 1) == 0
    assert LEAST_SLOT <= slot <= LARGEST_SLOT
    assert need <= free - free // MARGIN
    assert slot == LEAST_SLOT or need <= free / SLOTS_SHARE
    assert plan_slot(2 * free, ranks, beside) >= slot


@given(st.integers(0, 1 << 33), st.integers(0, 1 << 33))
def test_a_margin_is_left(free: int, nbytes: int) -> None:
    assert has_room(None, nbytes)
    assert has_room(free, nbytes) == (nbytes <= free - free // MARGIN)


def test_a_shortage_is_told_with_the_remedy() -> None:
    words = shortage("node-a", "/dev/shm", 3_000_000, 50_000_000, "they send messages")
    assert words == (
        "unisono: /dev/shm of node-a has 3.0 MB free, and the ranks would take 50.0 MB: they send messages. Remedy: a "
        "larger /dev/shm: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
    )
