from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order import ShuffleOptions, permutation, ranks_of, scope_note, share, steps_of
from unisono.data.storage.partitioned import check_groups, form_groups, owners_in_epoch
from unisono.errors import PackError
from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.schedules.pieces import bounds

SEATS = st.integers(1, 9).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks), st.sampled_from([groups for groups in range(1, ranks + 1) if not ranks % groups])
    )
)
"""Ranks, and groups that they can form."""


def owners_of(order: np.ndarray, batch: int, ranks: int, groups: int) -> np.ndarray:
    """Owners where each rank is on a node of its own."""
    return owners_in_epoch(order, batch, np.array(form_groups(one_rank_per_node(ranks), groups).member_of_rank))


def test_the_example_of_the_docstring() -> None:
    order = np.array([7, 2, 9, 4, 0, 5, 1, 8, 3, 6])
    assert ranks_of(10, 10, 2).tolist() == [0] * 5 + [1] * 5
    owners = owners_of(order, 4, 2, 1)
    assert np.flatnonzero(owners == 0).tolist() == [0, 2, 3, 5, 7]
    assert np.flatnonzero(owners == 1).tolist() == [1, 4, 6, 8, 9]


@given(st.integers(9, 120), st.integers(1, 64), SEATS, st.integers(0, 3))
def test_a_rank_owns_the_samples_of_its_steps(samples: int, batch: int, seats: tuple[int, int], epoch: int) -> None:
    ranks, groups = seats
    members = ranks // groups
    order = permutation(samples, 5, epoch)
    owners = owners_of(order, batch, ranks, groups)
    for step in range(steps_of(samples, batch)):
        for rank in range(ranks):
            assert (owners[share(order, batch, step, rank, ranks)] == rank % members).all()


@given(st.integers(9, 120), st.integers(1, 64), SEATS)
def test_each_sample_has_one_owner_in_each_group(samples: int, batch: int, seats: tuple[int, int]) -> None:
    ranks, groups = seats
    members = check_groups(samples, ranks, groups)
    for owners in (
        ranks_of(samples, samples, members),
        owners_of(permutation(samples, 0, 0), batch, ranks, groups),
    ):
        held = np.array([owners == rank % members for rank in range(ranks)]).reshape(groups, members, samples)
        assert (held.sum(axis=1) == 1).all()


@given(st.integers(9, 300), st.integers(1, 64), SEATS)
def test_owners_are_balanced_within_a_sample_of_each_step(samples: int, batch: int, seats: tuple[int, int]) -> None:
    ranks, groups = seats
    members = ranks // groups
    order = permutation(samples, 0, 0)
    owners = owners_of(order, batch, ranks, groups)
    for step in range(steps_of(samples, batch)):
        counts = np.bincount(owners[order[step * batch : (step + 1) * batch]], minlength=members)
        assert np.ptp(counts) <= groups, "each of a member's ranks has a sample more, or has not"
    assert np.ptp(np.bincount(owners, minlength=members)) <= groups * steps_of(samples, batch)


@pytest.mark.parametrize(("ranks", "kind"), [(1, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_owners_have_the_smallest_dtype(ranks: int, kind: type) -> None:
    order = permutation(600, 0, 0)
    owners = owners_of(order, 300, ranks, 1)
    assert owners.dtype == kind
    assert all((owners[share(order, 300, 1, rank, ranks)] == rank).all() for rank in range(ranks))


@given(st.integers(1, 300), st.integers(1, 9))
def test_each_reads_a_stretch_as_even_as_can_be(samples: int, members: int) -> None:
    owners = ranks_of(samples, samples, members)
    for member in range(members):
        assert np.flatnonzero(owners == member).tolist() == list(range(*bounds(samples, members, member)))


def test_groups_of_one_size_are_formed() -> None:
    assert [check_groups(10, 6, groups) for groups in (1, 2, 3, 6)] == [6, 3, 2, 1]


@pytest.mark.parametrize(
    ("samples", "ranks", "groups", "message"),
    [
        (10, 6, 4, r"6 ranks cannot form 4 groups of one size; \[1, 2, 3, 6\] can be formed"),
        (10, 6, 0, r"6 ranks cannot form 0 groups of one size; \[1, 2, 3, 6\] can be formed"),
        (10, 3, 6, r"3 ranks cannot form 6 groups of one size; \[1, 3\] can be formed"),
        (4, 10, 2, "5 ranks share 4 samples, so some would hold none; start at most 4"),
    ],
)
def test_groups_that_cannot_be_formed_are_refused(samples: int, ranks: int, groups: int, message: str) -> None:
    with pytest.raises(PackError, match=message):
        check_groups(samples, ranks, groups)


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
    formed, members = form_groups(placement, groups), ranks // groups
    assert Counter(formed.group_of_rank) == dict.fromkeys(range(groups), members)
    for group in range(groups):
        own = [rank for rank in range(ranks) if formed.group_of_rank[rank] == group]
        assert [formed.member_of_rank[rank] for rank in own] == list(range(members))
    sizes = Counter(placement.supernode_of(rank) for rank in range(ranks))
    sites = [{placement.supernode_of(r) for r in range(ranks) if formed.group_of_rank[r] == g} for g in range(groups)]
    if all(size % members == 0 for size in sizes.values()):
        assert all(len(site) == 1 for site in sites)
        assert formed.note == ""
    else:
        assert formed.group_of_rank == tuple(rank // members for rank in range(ranks))
        assert (formed.note == "") == (groups == 1)


@given(placements())
def test_groups_of_a_nodes_size_stay_on_nodes_where_the_numbers_divide(placement: Placement) -> None:
    sizes = {len(node) for node in placement.nodes}
    if len(sizes) == 1:
        formed = form_groups(placement, len(placement.nodes))
        assert all(len({formed.group_of_rank[rank] for rank in node}) == 1 for node in placement.nodes)


def test_the_example_of_groups() -> None:
    formed = form_groups(place([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 0, 0, 1, 1]), 2)
    assert formed.group_of_rank == (0, 0, 1, 1, 0, 0, 1, 1)
    assert formed.member_of_rank == (0, 1, 0, 1, 2, 3, 2, 3)


@pytest.mark.parametrize("placement", [one_rank_per_node(6), regular(1, 2, 3), regular(3, 1, 2)])
def test_ranks_that_are_numbered_by_place_are_grouped_by_number(placement: Placement) -> None:
    assert form_groups(placement, 3).group_of_rank == (0, 0, 1, 1, 2, 2)


def test_supernodes_that_do_not_divide_are_named() -> None:
    formed = form_groups(place(range(6), "aaaabb"), 2)
    assert formed.group_of_rank == (0, 0, 0, 1, 1, 1)
    assert formed.note == "groups of 3 ranks are formed by number of rank: supernodes of [4, 2] ranks do not divide"


@pytest.mark.parametrize(
    ("parts", "placement", "expected"),
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
def test_parts_that_cross_switches_are_named(parts: int, placement: Placement, expected: str) -> None:
    note = scope_note(ShuffleOptions(4, parts), placement)
    assert note.startswith(expected)
    assert bool(note) == bool(expected)
