import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order import permutation, ranks_of, share, steps_of


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 9), st.integers(0, 5))
def test_every_sample_of_an_epoch_is_seen_once_on_any_number_of_ranks(
    samples: int, batch: int, ranks: int, epoch: int
) -> None:
    order = permutation(samples, 3, epoch)
    seen = [share(order, batch, step, rank, ranks) for step in range(steps_of(samples, batch)) for rank in range(ranks)]
    assert sorted(np.concatenate(seen)) == list(range(samples))
    np.testing.assert_array_equal(np.concatenate(seen), order)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert permutation(8, 0, 0).tolist() == permutation(8, 0, 0).tolist() == [5, 0, 6, 1, 7, 2, 4, 3]
    assert len({tuple(permutation(50, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@given(st.integers(0, 200), st.integers(1, 64), st.integers(1, 9))
def test_the_rank_of_a_place_is_the_one_whose_share_has_it(samples: int, batch: int, ranks: int) -> None:
    places = np.arange(samples)
    found = ranks_of(samples, batch, ranks)
    assert len(found) == samples
    for step in range(steps_of(samples, batch)):
        for rank in range(ranks):
            assert (found[share(places, batch, step, rank, ranks)] == rank).all()
