from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order import own_numbers, permutation, ranks_of, share, steps_of, worker_order


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


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3), st.integers(0, 4))
def test_a_worker_visits_its_samples_in_an_order_of_its_own(count: int, seed: int, worker: int, epoch: int) -> None:
    numbers = np.arange(100, 100 + count)
    order = worker_order(numbers, seed, worker, epoch)
    assert sorted(order) == list(numbers)
    assert np.array_equal(order, worker_order(numbers, seed, worker, epoch))


def test_orders_of_workers_epochs_and_seeds_differ() -> None:
    orders = [tuple(worker_order(np.arange(50), *key)) for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert len(set(orders)) == 4
    assert tuple(permutation(50, 0, 0)) not in orders


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 40))
def test_own_batches_resume_at_any_step(count: int, batch: int, step: int) -> None:
    numbers, begun = np.arange(count), list[tuple[int, int]]()

    def draw(epoch: int, done: int) -> np.ndarray:
        begun.append((epoch, done))
        return worker_order(numbers, 3, 1, epoch)

    whole = [one for _, one in islice(own_numbers(draw, count, batch, 0), step + 12)]
    begun.clear()
    rest = [one for _, one in islice(own_numbers(draw, count, batch, step), 12)]
    assert begun[0] == divmod(step, steps_of(count, batch))
    assert all(np.array_equal(one, other) for one, other in zip(whole[step:], rest, strict=True))
    first = np.concatenate(whole[: steps_of(count, batch)]) if len(whole) >= steps_of(count, batch) else None
    assert first is None or sorted(first) == list(numbers)
