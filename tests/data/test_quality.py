import numpy as np
import pytest

from unisono.data.order import permutation
from unisono.data.quality import compare_with_permutations, quality
from unisono.data.storage.ownership import initial_owners

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


@pytest.mark.parametrize("samples", [0, 1])
def test_less_than_two_samples_have_no_order(samples: int) -> None:
    assert compare_with_permutations(np.arange(samples), CLASSES).max_z_score == 0
