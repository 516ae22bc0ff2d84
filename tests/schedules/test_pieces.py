from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UnisonoError
from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.schedules import SCHEDULES, find
from unisono.schedules.pieces import Cut, bounds, cut, cut_program
from unisono.schedules.schedule import Program

lengths = st.integers(0, 10_000)
counts = st.integers(1, 40)


@given(lengths, counts)
def test_bounds_cover_everything_once_and_evenly(length: int, parts: int) -> None:
    ends = [bounds(length, parts, part) for part in range(parts)]
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert ends[-1][1] == length
    sizes = [stop - start for start, stop in ends]
    assert max(sizes) - min(sizes) <= 1


@given(lengths, counts, counts, st.integers(1, 300), st.booleans())
def test_grains_are_whole(length: int, chunks: int, pieces: int, grain: int, chunk_major: bool) -> None:
    division = Cut(length, chunks, pieces, chunk_major, grain)
    grains = Cut(-(-length // grain), chunks, pieces, chunk_major)
    for piece, chunk in product(range(pieces), range(chunks)):
        region, same = division.region(piece, chunk), grains.region(piece, chunk)
        assert (region.start, region.stop) == (min(same.start * grain, length), min(same.stop * grain, length))


@given(lengths, counts, st.integers(1, 500), st.booleans())
def test_regions_cover_everything_once(length: int, chunks: int, largest: int, chunk_major: bool) -> None:
    division = cut(length, chunks, largest, chunk_major)
    regions = [division.region(piece, chunk) for piece in range(division.pieces) for chunk in range(chunks)]
    seen = sorted(place for region in regions for place in range(region.start, region.stop))
    assert seen == list(range(length))
    assert all(region.stop - region.start <= largest + 1 for region in regions)


@given(lengths, counts, st.data())
def test_a_span_is_its_chunks(length: int, chunks: int, data: st.DataObject) -> None:
    division = cut(length, chunks, 100)
    chunk = data.draw(st.integers(0, chunks - 1))
    span = data.draw(st.integers(1, chunks - chunk))
    region = division.region(0, chunk, span)
    assert (region.start, region.stop) == (division.region(0, chunk).start, division.region(0, chunk + span - 1).stop)


@given(lengths, counts)
def test_chunk_major_chunks_equal_bounds(length: int, chunks: int) -> None:
    division = cut(length, chunks, 7, chunk_major=True)
    for chunk in range(chunks):
        assert (division.region(0, chunk).start, division.region(division.pieces - 1, chunk).stop) == bounds(
            length, chunks, chunk
        )


def placements() -> Iterator[Placement]:
    yield from map(one_rank_per_node, range(2, 20))
    yield from (regular(1, nodes, ranks) for nodes in (1, 2, 3, 5) for ranks in (1, 2, 3, 4))
    yield from (place([rank % 2 for rank in range(ranks)]) for ranks in range(3, 9))


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_all_ranks_cut_a_schedule_alike_and_have_each_transfer_in_one_region(name: str, collective: str) -> None:
    for placement in placements():
        try:
            algorithm = getattr(find(name, placement), collective)
        except UnisonoError:  # not for this placement
            continue
        if algorithm is None:
            continue
        programs = [algorithm(rank, placement.ranks) for rank in range(placement.ranks)]
        cuts = {cut_program(program, 1000, 7, by_chunk=True) for program in programs}
        assert len(cuts) == 1, placement
        division = cuts.pop()
        transfers = {t for program in programs for lane in program.lanes for moves in lane for t in moves}
        for transfer in transfers:
            region = division.region(0, transfer.chunk, transfer.span)
            assert division.pieces > 1 or region.stop - region.start >= 1000 * transfer.span // program_chunks(programs)


def program_chunks(programs: list[Program]) -> int:
    """Chunks of a payload, equal for all ranks."""
    (chunks,) = {program.chunks for program in programs}
    return chunks
