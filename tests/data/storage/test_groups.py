from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order import ShuffleOptions
from unisono.data.storage.groups import form_groups, scope_note
from unisono.placement import Placement, one_rank_per_node, place, regular


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any ranks on any nodes, each node under any switch."""
    nodes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=16))
    switch = draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    return place(nodes, [switch[node] for node in nodes])


@given(placements(), st.data())
def test_groups_are_of_one_size_and_under_one_switch_where_the_numbers_divide(
    placement: Placement, data: st.DataObject
) -> None:
    ranks = placement.ranks
    groups = data.draw(st.sampled_from([count for count in range(1, ranks + 1) if ranks % count == 0]))
    found, members = form_groups(placement, groups), ranks // groups
    assert Counter(found.group_of_rank) == dict.fromkeys(range(groups), members)
    for group in range(groups):
        own = [rank for rank in range(ranks) if found.group_of_rank[rank] == group]
        assert [found.member_of_rank[rank] for rank in own] == list(range(members))
    sizes = Counter(placement.supernode_of(rank) for rank in range(ranks))
    sites = [{placement.supernode_of(r) for r in range(ranks) if found.group_of_rank[r] == g} for g in range(groups)]
    if all(size % members == 0 for size in sizes.values()):
        assert all(len(site) == 1 for site in sites)
        assert found.note == ""
    else:
        assert found.group_of_rank == tuple(rank // members for rank in range(ranks))
        assert (found.note == "") == (groups == 1)


@given(placements())
def test_groups_of_a_nodes_size_stay_on_nodes_where_the_numbers_divide(placement: Placement) -> None:
    sizes = {len(node) for node in placement.nodes}
    if len(sizes) == 1:
        found = form_groups(placement, len(placement.nodes))
        assert all(len({found.group_of_rank[rank] for rank in node}) == 1 for node in placement.nodes)


def test_the_example_of_the_docstring() -> None:
    found = form_groups(place([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 0, 0, 1, 1]), 2)
    assert found.group_of_rank == (0, 0, 1, 1, 0, 0, 1, 1)
    assert found.member_of_rank == (0, 1, 0, 1, 2, 3, 2, 3)


@pytest.mark.parametrize("placement", [one_rank_per_node(6), regular(1, 2, 3), regular(3, 1, 2)])
def test_ranks_that_are_numbered_by_place_are_grouped_by_number(placement: Placement) -> None:
    assert form_groups(placement, 3).group_of_rank == (0, 0, 1, 1, 2, 2)


def test_supernodes_that_do_not_divide_are_named() -> None:
    found = form_groups(place(range(6), "aaaabb"), 2)
    assert found.group_of_rank == (0, 0, 0, 1, 1, 1)
    assert found.note == "groups of 3 ranks are formed by number of rank: supernodes of [4, 2] ranks do not divide"


@pytest.mark.parametrize(
    ("parts", "placement", "words"),
    [
        (0, regular(2, 1, 2), ""),
        (2, regular(2, 1, 2), ""),
        (8, regular(2, 1, 2), ""),
        (1, regular(1, 4, 1), ""),
        (3, regular(2, 1, 2), "4 ranks do not divide into 3 parts"),
        (2, place(range(4), [0, 1, 0, 1]), "ranks 0 to 1 share a part, but are in 2 supernodes"),
        (1, regular(2, 1, 2), "ranks 0 to 3 share a part, but are in 2 supernodes"),
    ],
)
def test_parts_that_cross_switches_are_named(parts: int, placement: Placement, words: str) -> None:
    found = scope_note(ShuffleOptions(4, parts), placement)
    assert found.startswith(words)
    assert bool(found) == bool(words)
