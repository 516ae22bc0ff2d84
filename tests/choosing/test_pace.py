"""The pace of a payload: the same on all ranks, within its bounds, longer pieces only where schedules are steady."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.choosing.pace import AT_ONCE, LANDING, NAPS, PIECES, TURNS, UNMEASURED_PIECE, pace_of, piece_of
from unisono.network import DEFAULT
from unisono.placement import apart
from unisono.schedules import find, names

SLOW = replace(DEFAULT, beta=2.5e-3 / (30 << 10))
"""A link that carries 30 KiB in the time of a piece."""


@given(
    name=st.sampled_from(names()),
    ranks=st.integers(1, 9),
    length=st.integers(0, 1 << 28),
    itemsize=st.sampled_from((1, 2, 4, 8)),
    beta=st.floats(1e-12, 1e-5),
)
def test_all_ranks_have_the_same_pace_within_the_bounds(
    name: str, ranks: int, length: int, itemsize: int, beta: float
) -> None:
    algorithm = find(name, apart(ranks)).allreduce
    network = replace(DEFAULT, beta=beta)
    programs = [algorithm(rank, ranks) for rank in range(ranks)]
    paces = {pace_of(program, ranks, length, itemsize, network) for program in programs}
    assert len(paces) == 1
    pace, program = paces.pop(), programs[0]
    assert pace.largest * itemsize <= (PIECES[1] if network.measured else UNMEASURED_PIECE)
    lands = pace.largest * itemsize * pace.at_once * max(1, len(program.lanes)) * program.landing
    assert lands <= LANDING
    assert NAPS[0] <= pace.nap <= NAPS[1]


def test_short_payloads_go_in_pieces_of_the_link() -> None:
    ring = find("ring", apart(8)).allreduce(0, 8)
    assert pace_of(ring, 8, 1 << 18, 4, SLOW).largest == (30 << 10) // 4


def test_long_payloads_in_longer_pieces_where_the_schedule_is_steady() -> None:
    for name, chunks in {"ring": 8, "pipeline": 1}.items():
        length = 1 << 24
        pace = pace_of(find(name, apart(8)).allreduce(0, 8), 8, length, 4, SLOW)
        assert pace.at_once == AT_ONCE[1]
        assert pace.largest == length // (8 * TURNS), "as many pieces, whatever the chunks"
        assert length // (chunks * pace.largest) >= TURNS


@pytest.mark.parametrize("name", ["halving", "direct"])
def test_short_pieces_where_ranks_hear_from_many(name: str) -> None:
    pace = pace_of(find(name, apart(8)).allreduce(0, 8), 8, 1 << 24, 4, SLOW)
    assert (pace.largest, pace.at_once, pace.nap) == (piece_of(SLOW) // 4, AT_ONCE[0], NAPS[0])


def test_a_narrow_wire_has_pieces_of_as_many_bytes_on_the_way() -> None:
    ring = find("ring", apart(8)).allreduce(0, 8)
    assert pace_of(ring, 8, 1 << 18, 4, SLOW, 2).largest == 2 * pace_of(ring, 8, 1 << 18, 4, SLOW).largest


def test_a_rank_sleeps_no_longer_than_half_of_what_comes_takes() -> None:
    ring = find("ring", apart(8)).allreduce(0, 8)
    for length in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        pace = pace_of(ring, 8, length, 4, SLOW)
        assert pace.nap in (NAPS[0], NAPS[1]) or pace.nap <= 4 * min(pace.largest, length // 8) * SLOW.beta / 2


@pytest.mark.parametrize("name", ["ring", "halving", "pipeline", "direct"])
def test_pieces_have_256_kib_at_most_where_nothing_was_measured(name: str) -> None:
    for length in (1 << 18, 1 << 24, 1 << 28):
        pace = pace_of(find(name, apart(8)).allreduce(0, 8), 8, length, 4, DEFAULT)
        assert 4 * pace.largest <= 256 << 10
