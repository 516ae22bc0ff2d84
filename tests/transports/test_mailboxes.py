"""Seats of mailboxes: enough of them, none too small, the same on all ranks. The moves are tested under MPI."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import regular
from unisono.schedules import find
from unisono.transports.mailboxes import (
    ALIGNMENT_BYTES,
    MAX_MESSAGES_PER_PEER,
    MAX_SEATS,
    Mailboxes,
    plan_seats,
    sent_within,
)


@given(
    st.integers(0, 1 << 24),
    st.integers(1, 80),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 1 << 17),
    st.integers(1, 16),
)
def test_seats_hold_the_longest_messages_of_all_tickets(
    pool: int, lanes: int, span: int, itemsize: int, largest: int, in_flight: int
) -> None:
    seats = plan_seats(pool, lanes, span, itemsize, largest, in_flight)
    if seats is None:
        assert lanes > MAX_SEATS or pool // (lanes * span) < 2 * ALIGNMENT_BYTES + itemsize
        return
    assert 1 <= seats.in_flight <= in_flight
    assert 1 <= seats.chunk_length <= largest
    assert seats.tickets == lanes * seats.in_flight <= MAX_SEATS
    longest = (
        span * -(-seats.chunk_length * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    )  # each chunk a stretch of its own
    assert longest <= seats.nbytes
    assert seats.tickets * seats.nbytes <= pool


def test_chunks_sent_within_a_node() -> None:
    placement = regular(1, 4, 3)
    program = find("hierarchical", placement).allreduce(1, 12)
    assert sent_within(program, (0, 1, 2)) == (4, 1)  # a column of 4 chunks, once for both peers
    assert sent_within(program, (1,)) == sent_within(program, ()) == (0, 0)


def test_words_of_messages_are_distinct() -> None:
    words = {Mailboxes.word(*index) for index in product(range(3), range(9), range(MAX_MESSAGES_PER_PEER))}
    assert len(words) == 3 * 9 * MAX_MESSAGES_PER_PEER
    assert all(word % 2 == 0 for word in words)
