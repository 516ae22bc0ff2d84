from typing import Any

import numpy as np
import pytest

from unisono.data.order import epoch_order
from unisono.data.quality import compare_with_permutations, mixing, order_from_last
from unisono.data.shuffle_options import ShuffleOptions, parse_shuffle
from unisono.data.shuffle_report import COMPARED_EPOCHS, epochs_traffic, shuffle_report
from unisono.placement import regular

BATCH = 40


def test_a_true_permutation_mixes_as_it_should() -> None:
    found = mixing(4000, 40, 1, 6, ShuffleOptions(), 4)
    assert found.same_rank == pytest.approx(1 / 4, abs=0.02)
    assert found.seen == pytest.approx(1 - (3 / 4) ** 6, abs=0.02)


def test_samples_that_stay_are_seen_again_until_they_move() -> None:
    once = mixing(4000, 40, 1, 6, ShuffleOptions(0), 4)
    assert once.same_rank == 1
    assert once.seen == pytest.approx(1 / 4, abs=0.01)
    third = mixing(4000, 40, 1, 7, ShuffleOptions(3), 4)
    assert third.same_rank == pytest.approx((4 + 2 / 4) / 6, abs=0.02)


def test_samples_that_stay_in_a_part_are_seen_by_its_ranks_alone() -> None:
    found = mixing(4000, 40, 1, 40, ShuffleOptions(0, 2), 4)
    assert found.same_rank == pytest.approx(1 / 2, abs=0.02)
    assert found.seen == pytest.approx(1 / 2, abs=0.01)


@pytest.mark.parametrize("shuffle", ["epoch", "every:3", "every:3,parts:2", "once"])
@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_each_order_is_as_good_as_a_true_permutation_of_the_epoch_before(shuffle: str, epoch: int) -> None:
    """Except neighbours in a batch: if each place of a batch is a part, 1 in `steps` pairs stays side by side."""
    options, labels = parse_shuffle(shuffle), np.arange(3000) * 10 // 3000
    order = order_from_last(3000, 60, 1, epoch, options)
    assert sorted(order) == list(range(3000))
    before = epoch_order(3000, 60, 1, epoch - 1, options) if epoch else np.arange(3000)
    assert np.array_equal(before[order], epoch_order(3000, 60, 1, epoch, options))
    found, mean, std = compare_with_permutations(order, labels[before])
    assert abs(found.class_runs - mean.class_runs) < 4 * std.class_runs
    assert abs(found.distance - mean.distance) < 4 * std.distance
    assert found.neighbours < 2 * 60 / 3000
    assert compare_with_permutations(epoch_order(3000, 60, 1, epoch, options), labels).max_z_score < 4


def test_traffic_is_traded_for_mixing(many: Any) -> None:
    shuffles = [parse_shuffle(text) for text in ("epoch", "every:4,parts:2", "every:4", "once")]
    reports = [shuffle_report(many.index, BATCH, 0, shuffle, regular(2, 2, 2)) for shuffle in shuffles]
    sent, seen = [one.ranks for one in reports], [one.seen for one in reports]
    assert sent == sorted(sent, reverse=True)
    assert seen == sorted(seen, reverse=True)
    assert reports[1].uplinks == pytest.approx(reports[0].uplinks / 4, rel=0.1)
    assert reports[3].ranks == 0


def test_a_report_has_the_mean_of_all_epochs_but_the_first(many: Any) -> None:
    place, shuffle = regular(2, 1, 2), ShuffleOptions(5)
    epochs = epochs_traffic(many.index, BATCH, 0, COMPARED_EPOCHS + 1, shuffle, place, 1)
    found = shuffle_report(many.index, BATCH, 0, shuffle, place)
    assert found.nodes * 1e6 == pytest.approx(np.mean([traffic.nodes for traffic in epochs[1:]]))
