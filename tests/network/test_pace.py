"""The pace of a payload: the same on all ranks, within its bounds, longer pieces only where schedules are steady."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.network import DEFAULT
from unisono.network.pace import (
    MAX_LANDING_BYTES,
    MAX_UNMEASURED_PIECE_BYTES,
    MIN_LONG_PIECES,
    MIN_PIECES_PER_ROUND,
    PIECE_BYTES_RANGE,
    PIECES_IN_FLIGHT,
    SLEEP_SECONDS_RANGE,
    pace_of,
    piece_bytes_of,
)
from unisono.placement import one_rank_per_node
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
    algorithm = find(name, one_rank_per_node(ranks)).allreduce
    network = replace(DEFAULT, beta=beta)
    programs = [algorithm(rank, ranks) for rank in range(ranks)]
    paces = {pace_of(program, ranks, length, itemsize, network) for program in programs}
    assert len(paces) == 1
    pace, program = paces.pop(), programs[0]
    assert pace.chunk_length * itemsize <= (PIECE_BYTES_RANGE[1] if network.measured else MAX_UNMEASURED_PIECE_BYTES)
    lands = pace.chunk_length * itemsize * pace.in_flight * max(1, len(program.lanes)) * program.landing
    assert lands <= MAX_LANDING_BYTES
    assert SLEEP_SECONDS_RANGE[0] <= pace.max_sleep_seconds <= SLEEP_SECONDS_RANGE[1]


def test_short_payloads_go_in_pieces_of_the_link() -> None:
    ring = find("ring", one_rank_per_node(8)).allreduce(0, 8)
    assert pace_of(ring, 8, 1 << 18, 4, SLOW).chunk_length == (30 << 10) // 4


def test_a_payload_has_pieces_for_each_round_after_which_the_next_begins() -> None:
    circulant = find("circulant", one_rank_per_node(6)).allreduce(0, 6)  # 6 rounds
    slow, late = replace(DEFAULT, beta=4e-8), replace(DEFAULT, beta=4e-8, alpha=8e-4)
    lengths = [pace_of(circulant, 6, nbytes // 4, 4, slow).chunk_length * 4 for nbytes in (1 << 20, 4 << 20, 64 << 20)]
    assert lengths == [PIECE_BYTES_RANGE[0], (4 << 20) // (6 * MIN_PIECES_PER_ROUND) // 4 * 4, 62500]
    assert pace_of(circulant, 6, 1 << 18, 4, late).chunk_length * 4 == pytest.approx(20_000, abs=8), "its latency"


def test_long_payloads_in_longer_pieces_where_the_schedule_is_steady() -> None:
    for name, chunks in {"ring": 8, "pipeline": 1}.items():
        length = 1 << 24
        pace = pace_of(find(name, one_rank_per_node(8)).allreduce(0, 8), 8, length, 4, SLOW)
        assert pace.in_flight == PIECES_IN_FLIGHT[1]
        assert pace.chunk_length == length // (8 * MIN_LONG_PIECES), "as many pieces, whatever the chunks"
        assert length // (chunks * pace.chunk_length) >= MIN_LONG_PIECES


@pytest.mark.parametrize("name", ["halving", "direct"])
def test_short_pieces_if_ranks_receive_from_many(name: str) -> None:
    pace = pace_of(find(name, one_rank_per_node(8)).allreduce(0, 8), 8, 1 << 24, 4, SLOW)
    assert (pace.chunk_length, pace.in_flight, pace.max_sleep_seconds) == (
        piece_bytes_of(SLOW) // 4,
        PIECES_IN_FLIGHT[0],
        SLEEP_SECONDS_RANGE[0],
    )


def test_narrow_wire_keeps_the_bytes_of_a_piece() -> None:
    ring = find("ring", one_rank_per_node(8)).allreduce(0, 8)
    assert pace_of(ring, 8, 1 << 18, 4, SLOW, 2).chunk_length == 2 * pace_of(ring, 8, 1 << 18, 4, SLOW).chunk_length


def test_sleep_is_at_most_half_the_link_time_of_a_piece() -> None:
    ring = find("ring", one_rank_per_node(8)).allreduce(0, 8)
    for length in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        pace = pace_of(ring, 8, length, 4, SLOW)
        assert (
            pace.max_sleep_seconds in (SLEEP_SECONDS_RANGE[0], SLEEP_SECONDS_RANGE[1])
            or pace.max_sleep_seconds <= 4 * min(pace.chunk_length, length // 8) * SLOW.beta / 2
        )


@pytest.mark.parametrize("name", ["ring", "halving", "pipeline", "direct"])
def test_unmeasured_pieces_have_at_most_256_kib(name: str) -> None:
    for length in (1 << 18, 1 << 24, 1 << 28):
        pace = pace_of(find(name, one_rank_per_node(8)).allreduce(0, 8), 8, length, 4, DEFAULT)
        assert 4 * pace.chunk_length <= 256 << 10


@pytest.mark.parametrize(("nbytes", "piece"), [(512 << 10, 64 << 10), (1 << 20, 64 << 10), (2 << 20, 128 << 10)])
def test_an_unmeasured_chunk_goes_in_two_pieces_of_64_kib_or_more(nbytes: int, piece: int) -> None:
    """Else links idle while the only piece of a chunk is reduced."""
    ring = find("ring", one_rank_per_node(8)).allreduce(0, 8)
    assert pace_of(ring, 8, nbytes // 4, 4, DEFAULT).chunk_length * 4 == piece
