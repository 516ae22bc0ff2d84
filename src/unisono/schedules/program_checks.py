"""Errors that one rank's program shows by itself: a shape unlike rank 0's, no such peer or chunk, racing transfers."""

from __future__ import annotations

from itertools import combinations

from unisono.errors import ScheduleError
from unisono.placement import Placement
from unisono.schedules.schedule import Action, Program, Round, Transfer


def check_program(rank: int, ranks: int, program: Program, first: Program) -> None:
    """Raise ScheduleError for errors in one program: a shape unlike rank 0's, or transfers that race for a chunk."""
    chunks = first.chunks
    if program.chunks != chunks:
        raise ScheduleError(f"rank {rank} cuts the payload into {program.chunks} chunks, rank 0 into {chunks}")
    if program._replace(lanes=()) != first._replace(lanes=()) or len(program.lanes) != len(first.lanes):
        shapes = [{**p._asdict(), "lanes": len(p.lanes)} for p in (program, first)]
        unlike = [field for field in Program._fields if shapes[0][field] != shapes[1][field]]
        mine, others = (", ".join(f"{field} = {shape[field]}" for field in unlike) for shape in shapes)
        raise ScheduleError(f"rank {rank} has {mine}; rank 0 has {others}; all ranks have the same")
    if len(program.lanes) % program.columns:
        raise ScheduleError(f"{len(program.lanes)} lanes do not make {program.columns} columns of equal width")
    lane_of_chunk: dict[int, int] = {}
    for lane_number, lane in enumerate(program.lanes):
        for round_number, transfers in enumerate(lane):
            where = f"rank {rank}, lane {lane_number}, round {round_number}"
            if not transfers:
                raise ScheduleError(f"{where} has no transfers: leave the round out")
            for transfer in transfers:
                last = transfer.chunk + transfer.span - 1
                if transfer.peer == rank or not 0 <= transfer.peer < ranks:
                    raise ScheduleError(f"{where}: {describe(transfer)}: no such peer among {ranks} ranks")
                if transfer.span < 1 or not 0 <= transfer.chunk <= last < chunks:
                    raise ScheduleError(f"{where}: {describe(transfer)}: no such chunks among {chunks}")
                for chunk in range(transfer.chunk, last + 1):
                    if lane_of_chunk.setdefault(chunk, lane_number) != lane_number:
                        raise ScheduleError(f"{where}: chunk {chunk} belongs to lane {lane_of_chunk[chunk]}")
            _check_races(where, transfers)
            landing = sum(transfer.span for transfer in transfers if transfer.action is Action.ADD)
            if landing > program.landing:
                raise ScheduleError(
                    f"{where}: {landing} chunks are received at once; the program's limit is {program.landing}"
                )


def check_placement(rank: int, program: Program, placement: Placement) -> None:
    """Check the fields of a program that depend on the placement: `columns`, `landing_remote` and `steady`."""
    a_column = len(program.lanes) // program.columns
    adding = {
        number // a_column
        for number, lane in enumerate(program.lanes)
        if any(move.action is Action.ADD for moves in lane for move in moves)
    }
    if program.columns > 1 and len(adding) > 1:
        raise ScheduleError(f"rank {rank} adds in the lanes of columns {sorted(adding)}; at most one is allowed")
    node = placement.node_of(rank)
    for moves in (moves for lane in program.lanes for moves in lane):
        from_far = [t.span for t in moves if t.action is Action.ADD and placement.node_of(t.peer) != node]
        if program.landing_remote is not None and sum(from_far) > program.landing_remote:
            landing = f"{sum(from_far)} chunks are received at once from other nodes"
            raise ScheduleError(f"rank {rank}: {landing}; the program's limit is {program.landing_remote}")
    sources = {
        move.peer for lane in program.lanes for moves in lane for move in moves if move.action is not Action.SEND
    }
    far = sorted(peer for peer in sources if placement.node_of(peer) != placement.node_of(rank))
    if program.steady and len(far) > 2:
        raise ScheduleError(
            f"rank {rank} receives from ranks {far} of other nodes, which is not steady: set steady=False, or let each "
            "rank receive from at most 2"
        )


def _check_races(where: str, transfers: Round) -> None:
    """Refuse a RECEIVE that shares chunks, and two ADDs whose chunks partly overlap; rule 2 allows the rest."""
    for one, other in combinations(transfers, 2):
        overlap = one.chunk < other.chunk + other.span and other.chunk < one.chunk + one.span
        actions = {one.action, other.action}
        same = (one.chunk, one.span) == (other.chunk, other.span)
        if overlap and (Action.RECEIVE in actions or (actions == {Action.ADD} and not same)):
            raise ScheduleError(f"{where}: {describe(one)} and {describe(other)} race for a chunk")


def describe(transfer: Transfer) -> str:
    """Return a transfer in words."""
    return f"{transfer.action.value} chunk {transfer.chunk} span {transfer.span} peer {transfer.peer}"
