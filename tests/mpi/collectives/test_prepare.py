"""What is verified is what runs: fused and mixed forms make the bits of the schedule that they name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.mpi.collectives.distinct import RANKS, distinct
from tests.wires.scaled import BLOCK

from unisono.collectives import prepare
from unisono.collectives.all_to_all import all_to_all
from unisono.collectives.group import Group
from unisono.errors import UsageError
from unisono.network.pace import PIECE_BYTES_RANGE
from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.schedules import SCHEDULES, find
from unisono.schedules.pieces import bounds, cut
from unisono.testing import play_all
from unisono.transports.arithmetic import arithmetic_of
from unisono.transports.fused import FUSED
from unisono.transports.mailboxes import Seats, plan_seats
from unisono.wires import WIRES, wire_of
from unisono.world import World

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32)


def payloads(ranks: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What every rank has; the same on all ranks."""
    rows = [torch.randn(length, generator=torch.Generator().manual_seed(31 * length + rank)) for rank in range(ranks)]
    return [(100 * row).to(dtype) for row in rows]


def whole_numbers(ranks: int, length: int) -> list[torch.Tensor]:
    """As `payloads`, with sums that are exact: pieces of other lengths sum in another order."""
    return [row.round() for row in payloads(ranks, length, torch.float32)]


def by_threads(placement: Placement, collective: str, schedule: str, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Play a schedule on copies of all ranks' payloads, in this process."""
    dtype, length = rows[0].dtype, len(rows[0])
    algorithm = getattr(find(schedule, placement), collective)
    programs = [algorithm(rank, placement.ranks) for rank in range(placement.ranks)]
    arithmetic = arithmetic_of(dtype)
    copies = [row.clone() for row in rows]
    views = [arithmetic.view(copy.view(torch.uint8).numpy()) for copy in copies]
    chunk_major = collective != "allreduce"
    play_all(programs, lambda chunks: cut(length, chunks, length, chunk_major), views, arithmetic)
    return copies


@pytest.mark.parametrize("schedule", [schedule for collective, schedule in FUSED if collective == "allreduce"])
@pytest.mark.parametrize("length", [1, 5, 4099, 1_000_003])
def test_a_fused_allreduce_equals_its_schedule(group: World, schedule: str, length: int) -> None:
    for dtype in DTYPES if length < 5000 else DTYPES[:1]:
        rows = payloads(group.size, length, dtype)
        expected = by_threads(one_rank_per_node(group.size), "allreduce", schedule, rows)[group.rank]
        window = group.empty(length, dtype)
        window.copy_(rows[group.rank])
        for tensor in (rows[group.rank].clone(), window):
            assert torch.equal(group.allreduce(tensor, schedule), expected), dtype


@pytest.mark.parametrize("length", [1, 5, 4099, 1_000_003])
def test_fused_halves_equal_theirs(group: World, length: int) -> None:
    for dtype in DTYPES if length < 5000 else DTYPES[:1]:
        rows = payloads(group.size, length, dtype)
        own = slice(*bounds(length, group.size, group.rank))
        part = group.reduce_scatter(rows[group.rank], "direct")
        assert torch.equal(
            part, by_threads(one_rank_per_node(group.size), "reduce_scatter", "direct", rows)[group.rank][own]
        )
        gathered = by_threads(one_rank_per_node(group.size), "all_gather", "direct", rows)[group.rank]
        assert torch.equal(
            group.all_gather(rows[group.rank][own], torch.empty(length, dtype=dtype), "direct"), gathered
        )


def test_a_fused_all_to_all_equals_its_schedule(group: World) -> None:
    rows = payloads(group.size, 1001 * group.size, torch.float32)
    expected = torch.stack([row.view(group.size, -1)[group.rank] for row in rows]).view(-1)
    assert torch.equal(group.all_to_all(rows[group.rank], "direct"), expected)
    apart_ = World(group.comm.Dup(), one_rank_per_node(group.size), group.table)
    assert torch.equal(all_to_all(apart_._group, rows[group.rank], "direct"), expected)
    apart_.free()


def test_every_fused_form_names_a_schedule_that_has_the_collective() -> None:
    assert all(getattr(find(schedule, one_rank_per_node(4)), collective) is not None for collective, schedule in FUSED)


SEATINGS = {
    "two nodes by turns": lambda ranks: place([rank % 2 for rank in range(ranks)]),
    "one node larger": lambda ranks: place([0, *[min(1, rank) for rank in range(ranks - 1)]]),
    "one node of all but one": lambda ranks: place([int(rank == 0) for rank in range(ranks)]),
}


BY_NODE = [
    (seating, name)
    for seating, make in SEATINGS.items()
    for name in distinct(make(RANKS))
    if SCHEDULES[name.partition("/")[0]].by_node
]


@pytest.mark.parametrize(("seating", "schedule"), BY_NODE)
def test_schedules_by_node_are_played_as_they_are_verified(world: World, schedule: str, seating: str) -> None:
    """Through mailboxes within nodes and messages between them: the bits of the program, played by threads."""
    placement = SEATINGS[seating](world.size)
    spread = World(world.comm.Dup(), placement, world.table)
    cases = [payloads(world.size, 1, torch.float32), payloads(world.size, 1003, torch.bfloat16)]
    cases += [payloads(world.size, 4099, torch.float64), whole_numbers(world.size, 600_007)]
    for rows in cases:
        expected = by_threads(placement, "allreduce", schedule, rows)[world.rank]
        assert torch.equal(spread.allreduce(rows[world.rank].clone(), schedule), expected)
    spread.free()


def _plan_in(limit: int, pool: int, *asked: int) -> Seats | None:
    return plan_seats(min(pool, limit), *asked)


def test_small_mailboxes_shorten_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where a lane of its program would not fit at all, messages carry the same schedule."""
    placement = place([rank % 2 for rank in range(world.size)])
    rows = whole_numbers(world.size, 300_007)
    expected = by_threads(placement, "allreduce", "hierarchical", rows)[world.rank]
    for limit in (8 * PIECE_BYTES_RANGE[0], 0):
        monkeypatch.setattr(prepare, "plan_seats", partial(_plan_in, limit))
        spread = World(world.comm.Dup(), placement, world.table)
        assert torch.equal(spread.allreduce(rows[world.rank].clone(), "hierarchical"), expected), limit
        spread.free()


def test_own_wire_with_scales(spread: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file and one row: it encodes stretches into bytes, scales included; all ranks end with the same bits."""
    monkeypatch.setitem(WIRES, "scaled", "tests.wires.scaled:scaled")
    rows = payloads(spread.size, 40 * BLOCK + 7, torch.float32)
    exact = torch.stack(rows).sum(dim=0)
    for algorithm in ("direct", "ring", "auto"):
        summed = spread.allreduce(rows[spread.rank].clone(), algorithm, "scaled")
        assert (summed - exact).abs().max() <= spread.size**2 * 400 / 64
        assert len(set(spread.all_gather_object(summed.numpy().tobytes()))) == 1
    if spread.size > 2:
        with pytest.raises(UsageError, match=r"encodes blocks of numbers, .* use 'direct' or 'ring'"):
            spread.allreduce(rows[spread.rank].clone(), "halving", "scaled")
    wire_of.cache_clear()


@pytest.mark.parametrize(("wire", "levels"), [("int8", 127), ("int4", 7)])
def test_block_scaled_wires(spread: World, wire: str, levels: int) -> None:
    """One rounding of each part and one of the sum by `direct`; a ring rounds in every hop. Both in several pieces."""
    rows = payloads(spread.size, 300_007, torch.float32)
    exact, largest = torch.stack(rows).sum(dim=0), max(float(row.abs().max()) for row in rows)
    for algorithm in ("direct", "ring", "auto"):
        summed = spread.allreduce(rows[spread.rank].clone(), algorithm, wire)
        assert (summed - exact).abs().max() <= spread.size**2 * largest / levels
        assert len(set(spread.all_gather_object(summed.numpy().tobytes()))) == 1
        assert torch.equal(summed, exact) == (spread.size == 1)
    if spread.size > 2:
        with pytest.raises(UsageError, match=rf"the wire '{wire}': .* use 'direct' or 'ring'"):
            spread.allreduce(rows[spread.rank].clone(), "halving", wire)


def test_prepared_collectives_are_reused(spread: World) -> None:
    """A plan is prepared once, and starts on memory at any address."""
    group: Group = spread._group
    for _ in range(3):
        for length in (10, 300_000):
            assert spread.allreduce(torch.ones(length), "hierarchical").eq(spread.size).all()
    assert len([plan for plan in group.prepared if plan.algorithm == "hierarchical"]) == (2 if spread.size > 1 else 0)


def test_one_rank_a_node_has_no_mailboxes(world: World) -> None:
    alone = World(world.comm.Dup(), one_rank_per_node(world.size), world.table)
    assert alone.allreduce(torch.ones(1000), "hierarchical").eq(world.size).all()
    assert not alone._group._mailboxes
    alone.free()
    assert regular(1, 2, 2).nodes == ((0, 1), (2, 3))
