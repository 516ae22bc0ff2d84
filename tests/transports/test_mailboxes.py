"""Seats of mailboxes: enough of them, none too small, the same on all ranks. The moves are tested under MPI."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import regular
from unisono.schedules import find
from unisono.transports.mailboxes import (
    ALIGNED,
    MAX_NUMBERED,
    MAX_SEATS,
    Mailboxes,
    numbered_within,
    plan_seats,
    span_within,
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
    pool: int, lanes: int, span: int, itemsize: int, largest: int, at_once: int
) -> None:
    seats = plan_seats(pool, lanes, span, itemsize, largest, at_once)
    if seats is None:
        assert lanes > MAX_SEATS or pool // (lanes * span) < 2 * ALIGNED + itemsize
        return
    assert 1 <= seats.at_once <= at_once
    assert 1 <= seats.largest <= largest
    assert seats.tickets == lanes * seats.at_once <= MAX_SEATS
    longest = span * -(-seats.largest * itemsize // ALIGNED) * ALIGNED  # each chunk a stretch of its own
    assert longest <= seats.nbytes
    assert seats.tickets * seats.nbytes <= pool


def test_what_a_program_sends_within_its_node() -> None:
    placement = regular(1, 4, 3)
    program = find("hierarchical", placement).allreduce(1, 12)
    assert span_within(program, (0, 1, 2)) == 4  # a column of 4 chunks, once for both peers
    assert numbered_within(program, (0, 1, 2)) == 1
    assert span_within(program, (1,)) == numbered_within(program, ()) == 0


def test_each_message_has_words_of_its_own() -> None:
    words = {Mailboxes.word(*place) for place in product(range(3), range(9), range(MAX_NUMBERED))}
    assert len(words) == 3 * 9 * MAX_NUMBERED
    assert all(word % 2 == 0 for word in words)
