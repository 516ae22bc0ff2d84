from __future__ import annotations

import pytest

from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.schedules import SCHEDULES, find
from unisono.schedules.hierarchical import columns, nodes_of
from unisono.schedules.schedule import Action, Program
from unisono.view.schedule import TimedMessage, timed_messages

VARIANTS = SCHEDULES["hierarchical"].variants

UNEVEN = place([0, 1, 1, 0, 2, 2, 2, 1, 2])


def named(variant: str) -> str:
    return f"hierarchical/{variant}" if variant else "hierarchical"


def played(name: str, placement: Placement) -> tuple[list[Program], list[TimedMessage]]:
    algorithm = find(name, placement).allreduce
    programs = [algorithm(rank, placement.ranks) for rank in range(placement.ranks)]
    return programs, timed_messages(programs)


@pytest.mark.parametrize("variant", ["", "halving", "direct"])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 3), (4, 2), (4, 4)])
def test_each_node_sends_the_least_possible_over_its_link(variant: str, nodes: int, ranks: int) -> None:
    placement = regular(1, nodes, ranks)
    programs, messages = played(named(variant), placement)
    for node in range(nodes):
        leaving = [m for m in messages if placement.node_of(m.sender) == node != placement.node_of(m.receiver)]
        assert sum(m.span for m in leaving) / programs[0].chunks == pytest.approx(2 * (nodes - 1) / nodes)


@pytest.mark.parametrize("placement", [regular(2, 3, 3), UNEVEN])
@pytest.mark.parametrize("variant", ["", *VARIANTS])
def test_only_the_owner_of_a_column_sends_it_to_other_nodes(variant: str, placement: Placement) -> None:
    programs, messages = played(named(variant), placement)
    width = programs[0].chunks // columns(placement)
    for m in messages:
        ends = [placement.nodes[placement.node_of(rank)].index(rank) for rank in (m.sender, m.receiver)]
        column = m.chunk // width
        assert (m.chunk + m.span - 1) // width == column
        if placement.node_of(m.sender) != placement.node_of(m.receiver):
            assert ends == [column, column]
        else:
            assert ends[m.action is Action.ADD] == column


@pytest.mark.parametrize("variant", ["", *VARIANTS])
def test_one_rank_a_node_is_the_schedule_between_the_nodes(variant: str) -> None:
    placement = place(range(6), [0, 1, 0, 1, 0, 1])
    for rank in range(6):
        algorithm, inner = (find(name, placement).allreduce for name in (named(variant), variant or "ring"))
        assert algorithm(rank, 6) == inner(rank, 6)


def test_one_node_reduces_and_broadcasts() -> None:
    programs, messages = played("hierarchical", regular(1, 1, 4))
    assert [len(program.lanes) for program in programs] == [4] * 4
    assert {m.step for m in messages} == {0, 1}
    assert len(messages) == 2 * 4 * 3


def test_columns_and_schedule_between_nodes() -> None:
    assert (columns(UNEVEN), columns(one_rank_per_node(5)), columns(regular(2, 2, 3))) == (2, 1, 3)
    assert nodes_of(regular(2, 2, 3)) == place(range(4), [0, 0, 1, 1])


def test_lane_with_separate_chunks_sends_a_message_for_each_run() -> None:
    from unisono.schedules import hierarchical
    from unisono.schedules.schedule import add, receive, send
    from unisono.schedules.verify import verify

    def scattered(rank: int, ranks: int) -> Program:
        """Two lanes: chunks 0, 1 and 3, and chunk 2. Node 0 sums, node 1 hears."""
        lanes = [[(0, 2), (3, 1)], [(2, 1)]]
        there, back = (add, send) if rank == 0 else (send, receive)
        turns = [tuple(tuple(way(1 - rank, *run) for run in runs) for way in (there, back)) for runs in lanes]
        return Program(4, tuple(turns), 3)

    placement = regular(1, 2, 2)
    algorithm = hierarchical.hierarchical(placement, scattered)
    verify(algorithm, 4)
    assert [[(t.chunk, t.span) for t in lane[0]] for lane in algorithm(1, 4).lanes] == [
        [(0, 2), (3, 1)],
        [(2, 1)],
        [(4, 2), (7, 1)],
        [(6, 1)],
    ]
