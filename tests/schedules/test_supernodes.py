from __future__ import annotations

import pytest

from unisono.network.links import Network
from unisono.network.pace import pace_of
from unisono.network.simulate import simulate
from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.schedules import candidates, find
from unisono.schedules.circulant import circulant
from unisono.schedules.schedule import Action, Program
from unisono.schedules.supernodes import supernodes
from unisono.schedules.verify import verify

SHAPES = [(2, 6), (3, 4), (3, 5), (5, 4), (6, 8), (16, 16)]
"""Supernodes, and nodes in each."""


def played(placement: Placement) -> list[Program]:
    algorithm = supernodes(placement)
    return [algorithm(rank, placement.ranks) for rank in range(placement.ranks)]


def sent(program: Program, placement: Placement, rank: int, *, across: bool) -> float:
    """Return the share of the payload that a rank sends, in all or `across` supernodes."""
    sends = [t for lane in program.lanes for transfers in lane for t in transfers if t.action is Action.SEND]
    supernode = placement.supernode_of
    return sum(t.span for t in sends if not across or supernode(t.peer) != supernode(rank)) / program.chunks


@pytest.mark.parametrize(("groups", "nodes"), SHAPES)
def test_rounds_and_bytes(groups: int, nodes: int) -> None:
    placement = regular(groups, nodes, 1)
    programs, ranks = played(placement), placement.ranks
    assert {len(program.lanes[0]) for program in programs} == {
        2 * ((nodes - 1).bit_length() + (groups - 1).bit_length())
    }
    for rank, program in enumerate(programs):
        assert sent(program, placement, rank, across=False) == pytest.approx(2 * (ranks - 1) / ranks)
        assert sent(program, placement, rank, across=True) == pytest.approx(2 * (groups - 1) / groups / nodes)


def test_further_ranks_send_each_column_to_its_owner() -> None:
    placement = place(range(9), [0, 0, 1, 1, 1, 1, 0, 2, 2])
    programs = played(placement)
    verify(supernodes(placement), 9, placement=placement)
    assert {program.chunks for program in programs} == {6}
    assert [(t.action, t.peer, t.chunk, t.span) for t in programs[6].lanes[0][0]] == [
        (Action.SEND, 0, 0, 3),
        (Action.SEND, 1, 3, 3),
    ]
    crossing = [sent(program, placement, rank, across=True) for rank, program in enumerate(programs)]
    assert crossing == pytest.approx([2 / 3] * 4 + [0] * 3 + [2 / 3] * 2)


def test_one_supernode_is_circulant() -> None:
    placement = one_rank_per_node(7)
    assert played(placement) == [circulant(rank, 7) for rank in range(7)]


@pytest.mark.parametrize(("groups", "nodes"), SHAPES)
@pytest.mark.parametrize("oversubscribed", [1, 4])
def test_the_links_are_its_bound_for_any_shape(groups: int, nodes: int, oversubscribed: int) -> None:
    """100 MB on 10 Gbit/s: the parts of some pieces run beside those of others."""
    placement, beta, nbytes = regular(groups, nodes, 1), 8e-10, 100_000_000
    network = Network(2.5e-5, beta, 2.5e-10, uplink_beta=beta * oversubscribed / nodes)
    ranks = groups * nodes
    across = oversubscribed * 2 * (groups - 1) / ranks
    bound = max(2 * (ranks - 1) / ranks, across) * nbytes * beta
    pace = pace_of(supernodes(placement)(0, ranks), ranks, nbytes // 4, 4, network)
    simulation = simulate(supernodes(placement), placement, network, nbytes, 4 * pace.chunk_length, pace.in_flight)
    assert bound <= simulation.seconds * (1 + 1e-9) <= 1.10 * bound


def test_a_trial_is_worth_it_where_supernodes_have_several_nodes() -> None:
    assert "supernodes" in candidates("allreduce", regular(3, 5, 1))
    for placement in (one_rank_per_node(8), regular(4, 1, 1), regular(2, 4, 2)):
        assert "supernodes" not in candidates("allreduce", placement)
    assert "hierarchical/supernodes" in candidates("allreduce", regular(2, 4, 2))
    assert find("supernodes", regular(2, 2, 1)).reduce_scatter is None
