from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data import order as order_file
from unisono.data.order import (
    DRAWS_PER_SAMPLE,
    CounterRNG,
    ShuffleOptions,
    epoch_order,
    own_numbers,
    parse_shuffle,
    permutation,
    random_draw,
    ranks_of,
    share,
    steps_of,
    uniform_numbers,
    worker_order,
)
from unisono.errors import RecipeError


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
    assert len({tuple(permutation(50, seed, 0)) for seed in (0, 1 << 63, (1 << 63) + 1, (1 << 64) - 1)}) == 4
    assert permutation(8, (1 << 63) - 1, 2).tolist() == [1, 7, 4, 5, 6, 3, 0, 2], "that of older releases"


@given(st.integers(0, 200), st.integers(1, 64), st.integers(1, 9))
def test_the_rank_of_a_place_is_the_one_whose_share_has_it(samples: int, batch: int, ranks: int) -> None:
    places = np.arange(samples)
    owners = ranks_of(samples, batch, ranks)
    assert len(owners) == samples
    for step in range(steps_of(samples, batch)):
        for rank in range(ranks):
            assert (owners[share(places, batch, step, rank, ranks)] == rank).all()


@given(st.integers(0, 200), st.integers(1, 64), st.integers(1, 9), st.integers(0, 9))
def test_ranks_have_whole_shares_of_virtual_ranks(samples: int, batch: int, ranks: int, more: int) -> None:
    places, virtual = np.arange(samples), ranks + more
    owners = ranks_of(samples, batch, ranks, virtual)
    for step in range(steps_of(samples, batch)):
        shares = [share(places, batch, step, virtual_rank, virtual) for virtual_rank in range(virtual)]
        for rank in range(ranks):
            own = share(places, batch, step, rank, ranks, virtual)
            several = range(virtual * rank // ranks, virtual * (rank + 1) // ranks)
            assert np.array_equal(own, np.concatenate([shares[virtual_rank] for virtual_rank in several]))
            assert (owners[own] == rank).all()


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

    full = [samples for _, samples in islice(own_numbers(draw, count, batch, 0), step + 12)]
    begun.clear()
    rest = [samples for _, samples in islice(own_numbers(draw, count, batch, step), 12)]
    assert begun[0] == divmod(step, steps_of(count, batch))
    assert all(np.array_equal(samples, resumed) for samples, resumed in zip(full[step:], rest, strict=True))
    first = np.concatenate(full[: steps_of(count, batch)]) if len(full) >= steps_of(count, batch) else None
    assert first is None or sorted(first) == list(numbers)


@given(st.integers(1, 300), st.integers(0, 9), st.integers(0, 50), st.data())
def test_a_draw_has_each_sample_once_at_most_and_depends_on_nothing_else(
    count: int, worker: int, draw: int, data: st.DataObject
) -> None:
    numbers = np.arange(count, dtype=np.int64) * 3
    samples = data.draw(st.integers(1, count))
    drawn = random_draw(numbers, 5, worker, draw, samples)
    assert drawn.dtype == np.int64
    assert len(set(drawn.tolist())) == samples
    assert set(drawn.tolist()) <= set(numbers.tolist())
    np.testing.assert_array_equal(drawn, random_draw(numbers, 5, worker, draw, samples))


def test_draws_of_other_seeds_workers_and_numbers_are_others() -> None:
    numbers = np.arange(1000, dtype=np.int64)
    draws = [(seed, worker, draw) for seed in range(2) for worker in range(2) for draw in range(2)]
    assert len({tuple(random_draw(numbers, *each, 20).tolist()) for each in draws}) == len(draws)


SHUFFLES = st.tuples(st.sampled_from([0, 2, 3]), st.integers(0, 6)).map(lambda pair: ShuffleOptions(*pair))


def test_the_order_between_two_shuffles_of_the_docstring() -> None:
    held = np.array([7, 2, 9, 4, 0, 5, 1, 8, 3, 6])
    own = np.array([5, 0, 6, 1, 7, 2, 4, 3, 8, 9])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_file, "permutation", lambda samples, seed, epoch: own if epoch else held)
        order = epoch_order(10, 4, 0, 1, ShuffleOptions(2, 2))
    assert order.tolist() == [5, 0, 6, 1, 7, 2, 4, 8, 3, 9]


@given(st.integers(1, 200), st.integers(1, 40), SHUFFLES, st.integers(0, 7))
def test_parts_keep_their_samples_and_see_each_once(
    samples: int, batch: int, shuffle: ShuffleOptions, epoch: int
) -> None:
    """The oracle gives each part its samples of the last full shuffle, one by one, in the epoch's own order."""
    order = epoch_order(samples, batch, 3, epoch, shuffle)
    assert sorted(order) == list(range(samples))
    parts = ranks_of(samples, batch, min(shuffle.parts or batch, batch))
    held = dict(zip(permutation(samples, 3, shuffle.first_epoch(epoch)).tolist(), parts.tolist(), strict=True))
    waiting: dict[int, list[int]] = {}
    for sample in permutation(samples, 3, epoch).tolist():
        waiting.setdefault(held[sample], []).append(sample)
    assert order.tolist() == [waiting[part].pop(0) for part in parts.tolist()]


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_ranks_keep_their_samples_where_they_divide_the_parts(
    samples: int, ranks: int, each: int, more: int, epoch: int
) -> None:
    batch, shuffle = ranks * each * more, ShuffleOptions(3, ranks * each)
    held = [np.empty(samples, int) for _ in range(2)]
    for owner, order_epoch in zip(held, (0, epoch), strict=True):
        owner[epoch_order(samples, batch, 5, order_epoch, shuffle)] = ranks_of(samples, batch, ranks)
    assert np.array_equal(*held)


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 9))
def test_without_parts_any_ranks_keep_all_but_a_few_samples_of_a_short_batch(
    samples: int, batch: int, ranks: int
) -> None:
    shuffle, ranks = ShuffleOptions(4), min(ranks, batch)
    held = [np.empty(samples, int) for _ in range(2)]
    for owner, epoch in zip(held, (1, 2), strict=True):
        owner[epoch_order(samples, batch, 5, epoch, shuffle)] = ranks_of(samples, batch, ranks)
    moved = int((held[0] != held[1]).sum())
    assert moved <= 2 * (ranks - 1)
    assert not moved or (samples % batch and batch % ranks)


def test_by_default_each_epoch_has_its_own_permutation() -> None:
    for epoch in range(3):
        assert np.array_equal(epoch_order(50, 8, 1, epoch, ShuffleOptions()), permutation(50, 1, epoch))


def test_orders_between_two_shuffles_differ() -> None:
    orders = {tuple(epoch_order(60, 12, 1, epoch, ShuffleOptions(0, 2))) for epoch in range(6)}
    assert len(orders) == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch", ShuffleOptions()),
        ("every:3", ShuffleOptions(3)),
        ("once", ShuffleOptions(0)),
        ("every:4,parts:2", ShuffleOptions(4, 2)),
        ("once,parts:8", ShuffleOptions(0, 8)),
    ],
)
def test_words_and_values(text: str, expected: ShuffleOptions) -> None:
    assert parse_shuffle(text) == expected
    assert str(expected) == text


def test_every_epoch_has_one_value() -> None:
    assert parse_shuffle("every:1") == parse_shuffle("epoch")


@pytest.mark.parametrize(
    "text",
    [
        *("", "never", "every", "every:0", "every:-2", "every:1.5", "every:2 ", "every:\N{SUPERSCRIPT TWO}"),
        *("parts:2", "epoch,parts:2", "every:1,parts:2", "once,parts:0", "every:2,", "every:2,parts:"),
        "every:9999999999",
    ],
)
def test_other_words_are_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(RecipeError, match=r'it is "epoch", "every:N" or "once"'):
        parse_shuffle(text)


@given(st.integers(0, 6), st.integers(0, 40))
def test_the_last_shuffle_between_all_ranks(every: int, epoch: int) -> None:
    shuffles = [0] if not every else list(range(0, epoch + 1, every))
    assert ShuffleOptions(every).first_epoch(epoch) == shuffles[-1]


@given(st.integers(0, 2**63), st.integers(0, 1000), st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_the_numbers_of_a_sample_do_not_depend_on_its_neighbours(seed: int, epoch: int, samples: list[int]) -> None:
    together = uniform_numbers(seed, epoch, np.array(samples), DRAWS_PER_SAMPLE)
    for row, sample in zip(together, samples, strict=True):
        np.testing.assert_array_equal(row, uniform_numbers(seed, epoch, np.array([sample]), DRAWS_PER_SAMPLE)[0])
    assert (together >= 0).all()
    assert (together < 1).all()


def test_seed_epoch_and_sample_each_change_them() -> None:
    numbers = uniform_numbers(1, 2, np.array([3]), DRAWS_PER_SAMPLE)
    for other in (
        uniform_numbers(0, 2, np.array([3]), DRAWS_PER_SAMPLE),
        uniform_numbers(1, 1, np.array([3]), DRAWS_PER_SAMPLE),
        uniform_numbers(1, 2, np.array([2]), DRAWS_PER_SAMPLE),
    ):
        assert not (numbers == other).any()


def test_they_are_spread_evenly_and_do_not_follow_each_other() -> None:
    numbers = uniform_numbers(0, 0, np.arange(20_000), 4)
    counts = np.histogram(numbers, 50, (0, 1))[0]
    assert abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())
    columns = np.corrcoef(numbers.T) - np.eye(4)
    neighbours = np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]
    assert max(abs(columns).max(), abs(neighbours)) < 0.04


def test_numbers_are_returned_one_by_one() -> None:
    throws = CounterRNG([0.5, 0.25])
    assert (throws.random(), throws.random()) == (0.5, 0.25)
