"""What real ranks are fed with does not depend on how many there are."""

from __future__ import annotations

import io
import wave
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unisono.data.builtin import in_memory_feed
from unisono.data.feed import Feed, packed_feed
from unisono.data.kinds import AUDIO
from unisono.data.loading import Batch
from unisono.data.options import DataOptions
from unisono.data.order import epoch_rng, permutation, share, steps_of, worker_order
from unisono.data.pack.index import read_index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.data.storage import FILES, STORAGES
from unisono.data.storage.streamed_order import blocks_of_pack, streamed_order
from unisono.world import World

BATCH, SEED, SAMPLES, TESTED = 16, 4, 101, 37
STEPS = steps_of(SAMPLES, BATCH)

IN_PACKS = [name for name in STORAGES if name != FILES]


def whole(world: World, feed: Feed, epoch: int, first: int = 0, last: int = STEPS) -> list[Batch]:
    """The whole batches of an epoch's steps from `first` to `last` - 1, of all ranks."""
    batches = feed.epoch(epoch, BATCH, first)
    own = [(inputs.clone(), labels) for inputs, labels in (next(batches) for _ in range(first, last))]
    return [
        (torch.cat([inputs for inputs, _ in step]), torch.cat([labels for _, labels in step]))
        for step in zip(*world.all_gather_object(own), strict=True)
    ]


def numbers_in(batches: list[Batch], packs: Path) -> list[int]:
    """What the first two pixels say."""
    about = read_index(packs / "train").about
    pixels = [((inputs[:, 0, 0, :2] * about.std[0] + about.mean[0]) * 255).round() for inputs, _ in batches]
    return [int(low + 256 * high) for each in pixels for low, high in each.tolist()]


def order_of(storage: str, packs: Path, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch, made without a storage."""
    if storage == "streamed":
        blocks = blocks_of_pack(read_index(packs / "train"))
        return streamed_order(blocks, BATCH, DataOptions().buffer, epoch_rng(SEED, epoch))
    return permutation(SAMPLES, SEED, epoch)


@pytest.mark.parametrize("storage", [*IN_PACKS, "groups"])
def test_all_ranks_together_see_the_batches_that_one_sees(group: World, packs: Path, storage: str) -> None:
    place = DataOptions(groups=group.size) if storage == "groups" else DataOptions(storage=storage)
    alone = group.split(group.rank)
    serial_place = place if storage == "streamed" else DataOptions()
    serial_feed = packed_feed(replace(serial_place, pack=str(packs), augment="shift"), alone, SEED)
    feed = packed_feed(replace(place, pack=str(packs), augment="shift", threads=2), group, SEED)
    assert (feed.samples, feed.test_samples, feed.classes, feed.channels) == (SAMPLES, TESTED, 3, 1)
    for epoch in (0, 3):
        for serial, parallel in zip(whole(alone, serial_feed, epoch), whole(group, feed, epoch), strict=True):
            assert torch.equal(serial[0], parallel[0])
            assert torch.equal(serial[1], parallel[1])
    feed.close()
    serial_feed.close()
    alone.free()


def test_between_nodes_too(spread: World, packs: Path) -> None:
    seen = []
    in_memory = [DataOptions(storage=name) for name in IN_PACKS if name != "streamed"]
    for place in (*in_memory, DataOptions(groups=spread.size)):
        feed = packed_feed(replace(place, pack=str(packs)), spread, SEED)
        seen.append(whole(spread, feed, 1))
        feed.close()
    assert numbers_in(seen[0], packs) == permutation(SAMPLES, SEED, 1).tolist()
    for other in seen[1:]:
        for batch, another in zip(seen[0], other, strict=True):
            assert torch.equal(batch[0], another[0])


@pytest.mark.parametrize("storage", IN_PACKS)
def test_two_resumes_within_an_epoch_the_second_on_fewer_ranks_see_each_sample_once(
    group: World, packs: Path, storage: str
) -> None:
    options, seen = DataOptions(pack=str(packs), storage=storage), list[int]()
    part = group.split(int(group.rank >= (group.size + 1) // 2))  # each part of the ranks makes the rest of it
    for world, first, last in ((group, 0, 2), (group, 2, 3), (part, 3, STEPS)):
        feed = packed_feed(options, world, SEED)
        seen += numbers_in(whole(world, feed, 1, first, last), packs)
        feed.close()
    assert sorted(seen) == list(range(SAMPLES))
    assert seen == order_of(storage, packs, 1).tolist()
    part.free()


def test_the_test_set_is_seen_once(group: World, packs: Path) -> None:
    feed = packed_feed(DataOptions(pack=str(packs), augment="shift"), group, SEED)
    for _ in range(2):
        own = [(inputs.clone(), labels) for inputs, labels in feed.test_batches(4)]
        everyone = [batch for batches in group.all_gather_object(own) for batch in batches]
        assert numbers_in(everyone, packs) == list(range(TESTED))
        labels = [label for _, labels in everyone for label in labels.tolist()]
        assert labels == read_index(packs / "test").label.tolist()
    feed.close()


def recordings(folder: Path) -> Path:
    """Packs of noises of many lengths, 101 to train on and 37 in the test set."""

    def noise(index: int) -> bytes:
        chance, file = np.random.default_rng(index), io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, 8000, 0, "NONE", ""))
            out.writeframes(chance.integers(-999, 999, chance.integers(1, 3000)).astype(np.int16).tobytes())
        return file.getvalue()

    for part, count in (("train", SAMPLES), ("test", TESTED)):
        samples = [noise(index) for index in range(count)]
        sizes = np.array([len(sample) for sample in samples])
        keys = [str(index) for index in range(count)]
        source = Source(AUDIO, ("even", "odd"), keys, np.arange(count) % 2, sizes, samples.__getitem__)
        pack(source, folder / part, PackOptions(stripes=3), 1, lambda: None)
    return folder


def test_recordings_are_the_same_on_any_number_of_ranks(group: World, tmp_path: Path) -> None:
    folder = group.call_on_root(lambda: recordings(tmp_path))
    options = DataOptions(pack=str(folder), augment="mask", windows=3, context=1, threads=2)
    alone = group.split(group.rank)
    serial_feed, feed = packed_feed(options, alone, SEED), packed_feed(options, group, SEED)
    assert (feed.samples, feed.test_samples, feed.classes, feed.channels) == (SAMPLES, TESTED, 2, 120)
    for serial, parallel in zip(whole(alone, serial_feed, 1), whole(group, feed, 1), strict=True):
        assert torch.equal(serial[0], parallel[0])
        assert torch.equal(serial[1], parallel[1])
    own = [(inputs.clone(), labels) for inputs, labels in feed.test_batches(7)]
    everyone = torch.cat([inputs for batches in group.all_gather_object(own) for inputs, _ in batches])
    assert torch.equal(everyone, torch.cat([inputs.clone() for inputs, _ in serial_feed.test_batches(7)]))
    feed.close()
    serial_feed.close()
    alone.free()


def test_a_data_set_that_every_rank_holds(group: World) -> None:
    from unisono.data.builtin import load_digits

    data = load_digits()
    feed = in_memory_feed(data, group, SEED)
    batches = feed.epoch(2, 100, 3)
    own = [labels for _, labels in batches]
    steps = [torch.cat(step) for step in zip(*group.all_gather_object(own), strict=True)]
    assert torch.equal(torch.cat(steps), data.train.labels[permutation(1437, SEED, 2)[300:]])
    tested = sum(len(labels) for _, labels in feed.test_batches(7))
    assert sum(group.all_gather_object(tested)) == feed.test_samples == 360


def own(feed: Feed, batch: int, step: int, count: int) -> list[Batch]:
    """This rank's own batches from `step` on."""
    return [(inputs.clone(), labels.clone()) for inputs, labels in islice(feed.own_batches(batch, step), count)]


@pytest.mark.parametrize("storage", IN_PACKS)
def test_each_rank_draws_by_itself_while_the_others_draw_nothing(group: World, packs: Path, storage: str) -> None:
    """One rank after another draws two epochs of its own and the test set; the others are in no call of the feed."""
    options = DataOptions(pack=str(packs), storage=storage, threads=2)
    feed = packed_feed(options, group, SEED, out_of_step=True)
    assert storage in feed.fingerprint, "in another storage a rank's own samples are others"
    mine = np.arange(SAMPLES)
    if storage != "replicated":
        mine = np.sort(share(permutation(SAMPLES, SEED, 0), SAMPLES, 0, group.rank, group.size))
    steps = steps_of(len(mine), 7)
    drawn = list[Batch]()
    for rank in range(group.size):
        if rank == group.rank:
            drawn = own(feed, 7, 0, 2 * steps)
            tested = [(inputs.clone(), labels) for inputs, labels in feed.test_batches(10, alone=True)]
        group.barrier()
    labels = read_index(packs / "train").label
    for epoch in (0, 1):
        batches = drawn[epoch * steps : (epoch + 1) * steps]
        order = np.array(numbers_in(batches, packs))
        if storage == "streamed":
            assert len(order) == len(set(order.tolist())) == len(mine)
            mine = np.sort(order) if epoch == 0 else mine
            assert np.array_equal(np.sort(order), mine), "the same samples in every epoch"
        else:
            assert order.tolist() == worker_order(mine, SEED, group.rank, epoch).tolist()
        assert torch.cat([its for _, its in batches]).tolist() == labels[order].tolist()
    assert numbers_in(tested, packs) == list(range(TESTED))
    assert [len(its) for _, its in tested] == [10, 10, 10, 7]
    held = [sample for numbers in group.all_gather_object(mine.tolist()) for sample in numbers]
    assert sorted(set(held)) == list(range(SAMPLES))
    assert storage == "replicated" or len(held) == SAMPLES
    feed.close()


def test_own_batches_resume_with_the_same_random_changes(group: World, packs: Path) -> None:
    options = DataOptions(pack=str(packs), augment="shift", threads=2)
    feed = packed_feed(options, group, SEED, out_of_step=True)
    drawn = own(feed, 7, 0, 40)
    for step in (1, 14, 15, 33):
        for (inputs, its), (expected, others) in zip(own(feed, 7, step, 3), drawn[step : step + 3], strict=True):
            assert torch.equal(inputs, expected)
            assert torch.equal(its, others)
    feed.close()


def test_workers_that_hold_all_samples_change_each_differently(group: World, packs: Path) -> None:
    options = DataOptions(pack=str(packs), augment="shift", threads=1, storage="replicated")
    feed = packed_feed(options, group, SEED, out_of_step=True)
    batches = own(feed, 5, 0, 21)
    feed.close()
    mine = {str(inputs.tolist()) for batch, _ in batches for inputs in batch}
    others = [made for rank, made in enumerate(group.all_gather_object(mine)) if rank != group.rank]
    assert all(len(mine & made) < len(mine) / 2 for made in others)


def test_ranks_draw_by_themselves_from_a_data_set_that_all_hold(group: World) -> None:
    from unisono.data.builtin import load_digits

    data = load_digits()
    feed = in_memory_feed(data, group, SEED)
    drawn = own(feed, 100, 0, 30)
    order = np.concatenate([worker_order(np.arange(feed.samples), SEED, group.rank, epoch) for epoch in (0, 1)])
    assert torch.equal(torch.cat([labels for _, labels in drawn])[: len(order)], data.train.labels[order])
    assert torch.equal(own(feed, 100, 17, 1)[0][0], drawn[17][0])
    tested = torch.cat([labels for _, labels in feed.test_batches(7, alone=True)])
    assert torch.equal(tested, data.test.labels)
    everyone = group.all_gather_object([labels.tolist() for _, labels in drawn])
    assert len({str(samples) for samples in everyone}) == group.size
