"""Division of a payload into pieces that are under way at once, and of each piece into the chunks of a schedule.

    piece-major (allreduce)        | 0 1 2 3 | 0 1 2 3 | 0 1 2 3 |      a span of chunks is one stretch of memory
    chunk-major (reduce_scatter, ...) | 0 0 0 | 1 1 1 | 2 2 2 | 3 3 3 |    rank r's chunk is one stretch of memory

Each piece runs through the whole schedule independently; several do at once, so that links stay busy between rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.schedules.schedule import Program


def bounds(length: int, parts: int, index: int, grain: int = 1) -> tuple[int, int]:
    """Return first and one-past-last element of part `index` of `length` elements in `parts` equal parts.

    Each part begins at a multiple of `grain`.

    >>> [bounds(10, 4, part) for part in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    >>> [bounds(10, 4, part, grain=4) for part in range(4)]
    [(0, 0), (0, 4), (4, 8), (8, 10)]
    """
    grains = -(-length // grain)
    first, last = grains * index // parts, grains * (index + 1) // parts
    return min(first * grain, length), min(last * grain, length)


@dataclass(frozen=True)
class Cut:
    """`length` elements in `pieces` pieces of `chunks` chunks each."""

    length: int
    chunks: int
    pieces: int
    chunk_major: bool = False
    grain: int = 1
    """Elements that are reduced together: pieces and chunks begin at multiples of it."""

    def region(self, piece: int, chunk: int, span: int = 1) -> slice:
        """Return the elements of `span` chunks from `chunk` of one piece. A chunk-major cut has no spans above 1."""
        if self.chunk_major:
            assert span == 1, "chunk-major chunks of one piece do not touch"
            start, stop = bounds(self.length, self.chunks, chunk, self.grain)
            first, last = bounds(stop - start, self.pieces, piece, self.grain)
            return slice(start + first, start + last)
        start, stop = bounds(self.length, self.pieces, piece, self.grain)
        first, _ = bounds(stop - start, self.chunks, chunk, self.grain)
        _, last = bounds(stop - start, self.chunks, chunk + span - 1, self.grain)
        return slice(start + first, start + last)


def cut_program(program: Program, length: int, largest: int, by_chunk: bool) -> Cut:
    """Return the cut of a payload for a program; `by_chunk` where each rank begins or ends with its own chunk.

    Then a program of spans, as `circulant`, has one piece: only so are both a span and a chunk one stretch of memory.
    If one rank's program has spans, all have, so the cut is the same on all ranks.
    """
    if by_chunk and any(transfer.span > 1 for lane in program.lanes for transfers in lane for transfer in transfers):
        return Cut(length, program.chunks, 1)
    return cut(length, program.chunks, largest, chunk_major=by_chunk)


def cut(length: int, chunks: int, largest: int, chunk_major: bool = False) -> Cut:
    """Return the cut with the fewest pieces in which no chunk of a piece has more than `largest` elements."""
    return Cut(length, chunks, max(1, -(-length // (chunks * max(1, largest)))), chunk_major)
