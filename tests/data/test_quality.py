import numpy as np
import pytest

from unisono.data.order import epoch_rng, permutation, share
from unisono.data.quality import compare_with_permutations, quality, shuffle_shares
from unisono.data.storage.ownership import initial_owners
from unisono.data.storage.streamed_order import StripeBlocks, streamed_order

CLASSES = np.arange(3000) * 10 // 3000
"""Sorted by class."""


def drawn_from_stretches(samples: int, ranks: int, batch: int) -> np.ndarray:
    """The order in which samples are seen when ranks draw at random from what they have read, without a shuffle."""
    holders = initial_owners(samples, ranks)
    own = [np.random.default_rng(rank).permutation(np.flatnonzero(holders == rank)) for rank in range(ranks)]
    steps = -(-samples // batch)
    return np.concatenate(
        [part for step in zip(*(np.array_split(each, steps) for each in own), strict=True) for part in step]
    )


def test_what_is_seen_as_it_was_packed() -> None:
    found = quality(np.arange(3000), CLASSES)
    assert found.class_runs == pytest.approx(2990 / 2999)
    assert (found.neighbours, found.distance) == (1.0, 0.0)
    assert compare_with_permutations(np.arange(3000), CLASSES).max_z_score > 100


def test_what_is_seen_from_the_end_to_the_beginning() -> None:
    found = quality(np.arange(3000)[::-1], CLASSES)
    assert found.neighbours == 1.0
    assert found.distance == pytest.approx(0.5)


@pytest.mark.parametrize("epoch", range(5))
def test_an_epochs_order_is_a_true_permutation(epoch: int) -> None:
    beside = compare_with_permutations(permutation(3000, 1, epoch), CLASSES)
    assert beside.max_z_score < 4
    assert beside.mean.class_runs == pytest.approx(0.1, abs=0.01)
    assert beside.mean.distance == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("ranks", [3, 4, 9])
def test_random_batches_without_a_shuffle_are_reported_from_a_true_permutation(ranks: int) -> None:
    order = drawn_from_stretches(3000, ranks, 60)
    assert sorted(order) == list(range(3000))
    assert compare_with_permutations(order, CLASSES).max_z_score > 20


def test_stretches_that_stay_whole_are_reported_where_there_are_no_classes() -> None:
    pieces = np.random.default_rng(0).permutation(np.split(np.arange(3000), 300), axis=0)
    beside = compare_with_permutations(pieces.reshape(-1), np.zeros(3000, np.int64))
    assert beside.found.neighbours == pytest.approx(0.9, abs=0.01)
    assert beside.max_z_score > 20


def test_what_moves_only_a_little_is_reported() -> None:
    rng = np.random.default_rng(0)
    near = np.concatenate([part[rng.permutation(len(part))] for part in np.split(np.arange(3000), 10)])
    beside = compare_with_permutations(near, rng.integers(0, 10, 3000))
    assert beside.found.distance < 0.04
    assert beside.max_z_score > 20


SORTED = StripeBlocks(np.arange(0, 3000, 10), np.arange(10, 3010, 10), np.arange(300) // 10, np.full(300, 10, np.int64))
"""30 stripes of 10 blocks of 10 samples."""


def test_the_streamed_order_is_even_over_a_step_and_not_over_a_ranks_share() -> None:
    """The pack is sorted by class, three stripes each. A true permutation has a tenth of neighbours of one class."""
    order = streamed_order(SORTED, 60, 600, epoch_rng(0, 0))
    whole, shares = (quality(shuffle_shares(order, 60, ranks), CLASSES) for ranks in (1, 6))
    assert 0.07 < whole.class_runs < 0.1, "6 of each class in nearly every step: 5 of 59 others have one's class"
    assert whole.distance == pytest.approx(1 / 3, abs=0.02)
    assert shares.class_runs > 1.4 * whole.class_runs, "a rank's share has fewer classes, and it shows"
    assert quality(order, CLASSES).class_runs > 0.3, "as it is laid out, which plays no part"


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_shares_keep_their_samples(ranks: int) -> None:
    order = epoch_rng(0, 0).permutation(101)
    found = shuffle_shares(order, 16, ranks)
    for step in range(7):
        for rank in range(ranks):
            one, other = (sorted(share(each, 16, step, rank, ranks)) for each in (order, found))
            assert one == other
    assert found.tolist() != order.tolist()


@pytest.mark.parametrize("samples", [0, 1])
def test_less_than_two_samples_have_no_order(samples: int) -> None:
    assert compare_with_permutations(np.arange(samples), CLASSES).max_z_score == 0
