"""What real ranks are fed with does not depend on how many there are."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from unisono.data.feed import Feed, Hold, InMemory, Packed
from unisono.data.loading import Batch
from unisono.data.order import permutation, steps_of
from unisono.data.pack.index import read_index
from unisono.data.pack.packing import Way, pack
from unisono.data.sources.source import SOUND, Source
from unisono.world import World

BATCH, SEED, SAMPLES, TESTED = 16, 4, 101, 37
STEPS = steps_of(SAMPLES, BATCH)


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
    pixels = [((inputs[:, 0, 0, :2] * about.deviation[0] + about.mean[0]) * 255).round() for inputs, _ in batches]
    return [int(low + 256 * high) for each in pixels for low, high in each.tolist()]


@pytest.mark.parametrize("hold", ["even", "groups", "whole"])
def test_all_ranks_together_see_the_batches_that_one_sees(group: World, packs: Path, hold: str) -> None:
    groups = group.size if hold == "groups" else 1
    alone = group.split(group.rank)
    one = Packed(Hold(packs, augment="shift"), alone, SEED)
    feed = Packed(Hold(packs, hold == "whole", groups, augment="shift", threads=2), group, SEED)
    assert (feed.samples, feed.tested, feed.classes, feed.channels) == (SAMPLES, TESTED, 3, 1)
    for epoch in (0, 3):
        for serial, parallel in zip(whole(alone, one, epoch), whole(group, feed, epoch), strict=True):
            assert torch.equal(serial[0], parallel[0])
            assert torch.equal(serial[1], parallel[1])
    feed.close()
    one.close()
    alone.free()


def test_between_nodes_too(spread: World, packs: Path) -> None:
    seen = []
    for hold in (Hold(packs), Hold(packs, whole=True), Hold(packs, groups=spread.size)):
        feed = Packed(hold, spread, SEED)
        seen.append(whole(spread, feed, 1))
        feed.close()
    assert numbers_in(seen[0], packs) == permutation(SAMPLES, SEED, 1).tolist()
    for other in seen[1:]:
        for one, another in zip(seen[0], other, strict=True):
            assert torch.equal(one[0], another[0])


@pytest.mark.parametrize("whole_pack", [False, True])
def test_two_resumes_within_an_epoch_the_second_on_fewer_ranks_see_each_sample_once(
    group: World, packs: Path, whole_pack: bool
) -> None:
    hold, seen = Hold(packs, whole_pack), list[int]()
    part = group.split(int(group.rank >= (group.size + 1) // 2))  # each part of the ranks makes the rest of it
    for world, first, last in ((group, 0, 2), (group, 2, 3), (part, 3, STEPS)):
        feed = Packed(hold, world, SEED)
        seen += numbers_in(whole(world, feed, 1, first, last), packs)
        feed.close()
    assert sorted(seen) == list(range(SAMPLES))
    assert seen == permutation(SAMPLES, SEED, 1).tolist()
    part.free()


def test_what_is_held_out_is_seen_once(group: World, packs: Path) -> None:
    feed = Packed(Hold(packs, augment="shift"), group, SEED)
    for _ in range(2):
        own = [(inputs.clone(), labels) for inputs, labels in feed.held_out(4)]
        everyone = [batch for batches in group.all_gather_object(own) for batch in batches]
        assert numbers_in(everyone, packs) == list(range(TESTED))
        labels = [label for _, labels in everyone for label in labels.tolist()]
        assert labels == read_index(packs / "test").label.tolist()
    feed.close()


def recordings(folder: Path) -> Path:
    """Packs of noises of many lengths, 101 to train on and 37 held out."""

    def noise(number: int) -> bytes:
        chance, file = np.random.default_rng(number), io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, 8000, 0, "NONE", ""))
            out.writeframes(chance.integers(-999, 999, chance.integers(1, 3000)).astype(np.int16).tobytes())
        return file.getvalue()

    for part, count in (("train", SAMPLES), ("test", TESTED)):
        samples = [noise(number) for number in range(count)]
        sizes = np.array([len(sample) for sample in samples])
        keys = [str(number) for number in range(count)]
        source = Source(SOUND, ("even", "odd"), keys, np.arange(count) % 2, sizes, samples.__getitem__)
        pack(source, folder / part, Way(stripes=3), 1, lambda: None)
    return folder


def test_recordings_are_heard_alike_too(group: World, tmp_path: Path) -> None:
    hold = Hold(group.call_on_root(lambda: recordings(tmp_path)), augment="mask", windows=3, context=1, threads=2)
    alone = group.split(group.rank)
    one, feed = Packed(hold, alone, SEED), Packed(hold, group, SEED)
    assert (feed.samples, feed.tested, feed.classes, feed.channels) == (SAMPLES, TESTED, 2, 120)
    for serial, parallel in zip(whole(alone, one, 1), whole(group, feed, 1), strict=True):
        assert torch.equal(serial[0], parallel[0])
        assert torch.equal(serial[1], parallel[1])
    own = [(inputs.clone(), labels) for inputs, labels in feed.held_out(7)]
    everyone = torch.cat([inputs for batches in group.all_gather_object(own) for inputs, _ in batches])
    assert torch.equal(everyone, torch.cat([inputs.clone() for inputs, _ in one.held_out(7)]))
    feed.close()
    one.close()
    alone.free()


def test_a_data_set_that_every_rank_holds(group: World) -> None:
    from unisono.data.digits import load

    data = load()
    feed = InMemory(data, group, SEED)
    batches = feed.epoch(2, 100, 3)
    own = [labels for _, labels in batches]
    steps = [torch.cat(step) for step in zip(*group.all_gather_object(own), strict=True)]
    assert torch.equal(torch.cat(steps), data.train.labels[permutation(1437, SEED, 2)[300:]])
    assert sum(group.all_gather_object(sum(len(labels) for _, labels in feed.held_out(7)))) == feed.tested == 360
