import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.storage.partition import MAX_RANKS_BY_PASSES, counts_for, rows_for


def test_the_example_of_the_docstring() -> None:
    assert [rows.tolist() for rows in rows_for(np.array([1, 0, 2, 1, 0], np.uint8), 3)] == [[1, 4], [0, 3], [2]]


@given(
    st.integers(1, 3 * MAX_RANKS_BY_PASSES).flatmap(
        lambda ranks: st.tuples(st.just(ranks), st.lists(st.integers(0, ranks - 1), max_size=200))
    ),
    st.sampled_from([np.uint8, np.uint16, np.int32]),
)
def test_rows_equal_a_search_for_each_rank(dealt: tuple[int, list[int]], kind: type) -> None:
    ranks, to = dealt
    wanted = [[row for row, other in enumerate(to) if other == rank] for rank in range(ranks)]
    assert [rows.tolist() for rows in rows_for(np.array(to, kind), ranks)] == wanted
    assert counts_for(np.array(to, kind), ranks).tolist() == [len(rows) for rows in wanted]


def test_many_rows_stay_in_order() -> None:
    for ranks in (MAX_RANKS_BY_PASSES, MAX_RANKS_BY_PASSES + 1, 300):
        to = np.random.default_rng(0).integers(0, ranks, 5000).astype(np.uint16)
        rows = rows_for(to, ranks)
        assert all((np.diff(own) > 0).all() for own in rows)
        assert all((to[own] == rank).all() for rank, own in enumerate(rows))
        assert sum(map(len, rows)) == len(to)
