import numpy as np
import pytest
from tests.data.order_quality import compare_with_permutations, mixing, order_from_last, quality, shuffle_shares

from unisono.data.order import ShuffleOptions, epoch_order, epoch_rng, parse_shuffle, permutation, ranks_of
from unisono.data.storage.streamed_order import StripeBlocks, streamed_order

CLASSES = np.arange(3000) * 10 // 3000
"""Sorted by class."""


def drawn_from_stretches(samples: int, ranks: int, batch: int) -> np.ndarray:
    """The order in which samples are seen when ranks draw at random from what they have read, without a shuffle."""
    holders = ranks_of(samples, samples, ranks)
    own = [np.random.default_rng(rank).permutation(np.flatnonzero(holders == rank)) for rank in range(ranks)]
    steps = -(-samples // batch)
    return np.concatenate(
        [part for step in zip(*(np.array_split(each, steps) for each in own), strict=True) for part in step]
    )


def test_what_is_seen_as_it_was_packed() -> None:
    measured = quality(np.arange(3000), CLASSES)
    assert measured.class_runs == pytest.approx(2990 / 2999)
    assert (measured.neighbours, measured.distance) == (1.0, 0.0)
    assert compare_with_permutations(np.arange(3000), CLASSES).max_z_score > 100


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


SORTED = StripeBlocks(np.arange(0, 3000, 10), np.arange(10, 3010, 10), np.arange(300) // 10, np.full(300, 10, np.int64))
"""30 stripes of 10 blocks of 10 samples."""


def test_the_streamed_order_is_even_over_a_step_and_not_over_a_ranks_share() -> None:
    """The pack is sorted by class, three stripes each. A true permutation has a tenth of neighbours of one class."""
    order = streamed_order(SORTED, 60, 600, epoch_rng(0, 0))
    steps, shares = (quality(shuffle_shares(order, 60, ranks), CLASSES) for ranks in (1, 6))
    assert 0.07 < steps.class_runs < 0.1, "6 of each class in nearly every step: 5 of 59 others have one's class"
    assert steps.distance == pytest.approx(1 / 3, abs=0.02)
    assert shares.class_runs > 1.4 * steps.class_runs, "a rank's share has fewer classes, and it shows"
    assert quality(order, CLASSES).class_runs > 0.3, "as it is laid out, which plays no part"


def test_a_true_permutation_mixes_as_it_should() -> None:
    measured = mixing(4000, 40, 1, 6, ShuffleOptions(), 4)
    assert measured.same_rank == pytest.approx(1 / 4, abs=0.02)
    assert measured.seen == pytest.approx(1 - (3 / 4) ** 6, abs=0.02)


def test_samples_that_stay_are_seen_again_until_they_move() -> None:
    once = mixing(4000, 40, 1, 6, ShuffleOptions(0), 4)
    assert once.same_rank == 1
    assert once.seen == pytest.approx(1 / 4, abs=0.01)
    third = mixing(4000, 40, 1, 7, ShuffleOptions(3), 4)
    assert third.same_rank == pytest.approx((4 + 2 / 4) / 6, abs=0.02)


def test_samples_that_stay_in_a_part_are_seen_by_its_ranks_alone() -> None:
    measured = mixing(4000, 40, 1, 40, ShuffleOptions(0, 2), 4)
    assert measured.same_rank == pytest.approx(1 / 2, abs=0.02)
    assert measured.seen == pytest.approx(1 / 2, abs=0.01)


@pytest.mark.parametrize("shuffle", ["epoch", "every:3", "every:3,parts:2", "once"])
@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_each_order_is_as_good_as_a_true_permutation_of_the_epoch_before(shuffle: str, epoch: int) -> None:
    """Except neighbours in a batch: if each place of a batch is a part, 1 in `steps` pairs stays side by side."""
    options, labels = parse_shuffle(shuffle), np.arange(3000) * 10 // 3000
    order = order_from_last(3000, 60, 1, epoch, options)
    assert sorted(order) == list(range(3000))
    before = epoch_order(3000, 60, 1, epoch - 1, options) if epoch else np.arange(3000)
    assert np.array_equal(before[order], epoch_order(3000, 60, 1, epoch, options))
    measured, mean, std = compare_with_permutations(order, labels[before])
    assert abs(measured.class_runs - mean.class_runs) < 4 * std.class_runs
    assert abs(measured.distance - mean.distance) < 4 * std.distance
    assert measured.neighbours < 2 * 60 / 3000
    assert compare_with_permutations(epoch_order(3000, 60, 1, epoch, options), labels).max_z_score < 4
