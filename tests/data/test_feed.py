"""In one process: each rank a thread."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.builtin import Dataset, Samples, in_memory_feed
from unisono.data.feed import check_alike, packed_feed
from unisono.data.kinds import AUDIO, IMAGE, RAW, TEXT
from unisono.data.kinds.image import MEAN_SIDE, image_options
from unisono.data.loading import STRETCHES, Batch
from unisono.data.options import DataOptions
from unisono.data.order import permutation, steps_of
from unisono.data.pack.index import About, Index, read_index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.engine import OperationSpan
from unisono.errors import PackError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

BATCH, SEED = 16, 4


def kept(batches: Any) -> list[Batch]:
    return [(inputs.clone(), labels) for inputs, labels in batches]


def whole(everyone: list[list[Batch]]) -> list[Batch]:
    """The batches of each step, of all ranks together."""
    return [
        (torch.cat([inputs for inputs, _ in step]), torch.cat([labels for _, labels in step]))
        for step in zip(*everyone, strict=True)
    ]


def numbers_in(batches: list[Batch], folder: Path) -> list[list[int]]:
    """What the first two pixels say."""
    about = read_index(folder).about
    pixels = [((inputs[:, 0, 0, :2] * about.std[0] + about.mean[0]) * 255).round() for inputs, _ in batches]
    return [(each[:, 0] + 256 * each[:, 1]).int().tolist() for each in pixels]


def epoch_on(
    on_ranks: OnRanks, ranks: int, options: DataOptions, epoch: int, first: int = 0, last: int | None = None
) -> list[Batch]:
    """The whole batches of an epoch's steps from `first` to `last` - 1, with everything made anew."""

    def work(world: Any) -> list[Batch]:
        feed = packed_feed(options, world, SEED)
        steps = (steps_of(feed.samples, BATCH) if last is None else last) - first
        batches = feed.epoch(epoch, BATCH, first)
        taken = kept(next(batches) for _ in range(steps))
        assert last is not None or next(batches, None) is None
        batches.close()
        feed.close()
        return taken

    return whole(on_ranks(ranks, work))


@given(st.integers(1, 80), st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_a_data_set_in_memory_is_seen_once_by_all_ranks_together(
    train: int, test: int, batch: int, ranks: int, done: int
) -> None:
    def samples(count: int) -> Samples:
        return Samples(torch.arange(count).float().reshape(-1, 1, 1, 1), torch.arange(count))

    data = Dataset(samples(train), samples(test), 7)
    feeds = [in_memory_feed(data, SimpleNamespace(rank=rank, size=ranks), 3) for rank in range(ranks)]
    steps = whole([list(feed.epoch(1, batch, done)) for feed in feeds])
    seen = [sample for _, labels in steps for sample in labels.tolist()]
    assert seen == permutation(train, 3, 1)[done * batch :].tolist()
    assert all(torch.equal(inputs.flatten(), labels.float()) for inputs, labels in steps)
    tested = [labels.tolist() for feed in feeds for _, labels in feed.test_batches(batch)]
    assert max(map(len, tested)) <= -(-batch // ranks), "together at most as many as in training, about"
    assert [sample for numbers in tested for sample in numbers] == list(range(test))
    assert (feeds[0].samples, feeds[0].test_samples, feeds[0].classes, feeds[0].channels) == (train, test, 7, 1)


@pytest.mark.parametrize("augment", ["none", "shift"])
def test_any_number_of_ranks_sees_the_batches_that_one_sees(on_ranks: OnRanks, numbered: Path, augment: str) -> None:
    options = augmented(numbered, augment)
    alone = epoch_on(on_ranks, 1, options, 2)
    for ranks, groups in ((2, 1), (3, 1), (6, 2), (9, 1)):
        together = epoch_on(on_ranks, ranks, replace(options, groups=groups), 2)
        for expected, batch in zip(alone, together, strict=True):
            assert torch.equal(expected[0], batch[0])
            assert torch.equal(expected[1], batch[1])


def test_an_epoch_follows_its_order_with_the_labels_of_the_pack(on_ranks: OnRanks, numbered: Path) -> None:
    batches = epoch_on(on_ranks, 3, DataOptions(pack=str(numbered)), 1)
    seen = [sample for numbers in numbers_in(batches, numbered / "train") for sample in numbers]
    assert seen == permutation(151, SEED, 1).tolist()
    labels = [label for _, labels in batches for label in labels.tolist()]
    assert labels == read_index(numbered / "train").label[seen].tolist()


@pytest.mark.parametrize(
    "legs", [((1, 3), (1, 6), (2, None)), ((4, 1), (4, 2), (9, None)), ((6, 4), (6, 5), (1, None))]
)
def test_two_resumes_within_an_epoch_and_one_on_other_ranks_see_each_sample_once(
    on_ranks: OnRanks, numbered: Path, legs: tuple[tuple[int, int | None], ...]
) -> None:
    first, seen = 0, list[int]()
    for ranks, last in legs:
        batches = epoch_on(on_ranks, ranks, DataOptions(pack=str(numbered)), 1, first, last)
        seen += [sample for numbers in numbers_in(batches, numbered / "train") for sample in numbers]
        first = last or first
    assert sorted(seen) == list(range(151))
    assert seen == permutation(151, SEED, 1).tolist()


def test_the_test_set_is_seen_once_as_it_is(on_ranks: OnRanks, numbered: Path) -> None:
    options = DataOptions(pack=str(numbered), augment="shift", threads=2)

    def work(world: Any) -> list[list[Batch]]:
        feed = packed_feed(options, world, SEED)
        assert (feed.samples, feed.test_samples, feed.classes, feed.channels) == (151, 37, 5, 1)
        looks = [kept(feed.test_batches(7)) for _ in range(2)]
        assert all(len(labels) <= 2 for _, labels in looks[0])
        next(feed.epoch(0, BATCH, 0))  # loading to train changes nothing of it
        looks.append(kept(feed.test_batches(7)))
        feed.close()
        return looks

    for looks in on_ranks(4, work):
        for later in looks[1:]:
            assert all(torch.equal(first[0], again[0]) for first, again in zip(looks[0], later, strict=True))
    everyone = [batch for looks in on_ranks(4, work) for batch in looks[0]]
    # mean and deviation of what is in the test set are those of what is trained on
    assert [n for numbers in numbers_in(everyone, numbered / "train") for n in numbers] == list(range(37))


def test_an_epoch_that_is_over_gives_nothing_of_the_next_one(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        feed = packed_feed(DataOptions(pack=str(numbered)), world, SEED)
        old = feed.epoch(0, BATCH, 0)
        next(old)
        new = feed.epoch(1, BATCH, 0)
        with pytest.raises(PackError, match="another epoch has begun"):
            kept(old)
        assert len(kept(new)) == steps_of(151, BATCH)
        feed.close()

    on_ranks(4, work)


def test_all_ranks_have_the_same_pack(on_ranks: OnRanks, numbered: Path, tmp_path: Path) -> None:
    (tmp_path / "train").symlink_to(numbered / "test")
    (tmp_path / "test").symlink_to(numbered / "train")

    def work(world: Any) -> str:
        with pytest.raises(PackError) as caught:
            packed_feed(DataOptions(pack=str(tmp_path if world.rank == 2 else numbered)), world, SEED)
        return str(caught.value)

    messages = on_ranks(3, work)
    assert [line.partition(" is ")[2] for line in messages] == [
        f"not the same on rank {rank} as on rank {other}; copy it again" for rank, other in ((2, 0), (2, 1), (0, 2))
    ]


def numbers_pack(folder: Path, stripes: int, classes: tuple[str, ...] = ("a",)) -> Path:
    """Grey images of 2 x 2, 40 in each part."""
    source = Source(RAW, classes, [*map(str, range(40))], [0] * 40, [4] * 40, lambda n: bytes(4 * [n]), (2, 2))
    for part in ("train", "test"):
        pack(source, folder / part, PackOptions(stripes=stripes), 1, lambda: None)
    return folder


def test_ranks_whose_packs_have_other_stripes_stream_none(on_ranks: OnRanks, tmp_path: Path) -> None:
    """The order depends on the stripes, so each rank would have another one. In memory, they are the same data."""
    packs = [numbers_pack(tmp_path / str(stripes), stripes) for stripes in (2, 5)]

    def work(world: Any) -> list[int]:
        options = DataOptions(pack=str(packs[world.rank]))
        before = set(threading.enumerate())
        with pytest.raises(PackError, match=f"not the same on rank {1 - world.rank} as on rank {world.rank}; copy it"):
            packed_feed(replace(options, storage="streamed"), world, SEED)
        world.all_gather_object(None)
        assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "reading"]
        feed = packed_feed(options, world, SEED)
        counts = [len(labels) for _, labels in feed.epoch(0, BATCH, 0)]
        feed.close()
        return counts

    assert on_ranks(2, work) == [[8, 8, 4]] * 2


def test_a_pack_that_is_wrong_on_one_rank_is_reported_on_all(on_ranks: OnRanks, tmp_path: Path) -> None:
    right, wrong = (numbers_pack(tmp_path / name, 2) for name in ("right", "wrong"))
    shutil.rmtree(wrong / "test")
    (wrong / "test").symlink_to(numbers_pack(tmp_path / "other", 2, ("a", "b")) / "test")

    def work(world: Any) -> str:
        with pytest.raises(PackError) as caught:
            packed_feed(DataOptions(pack=str(wrong if world.rank else right)), world, SEED)
        return str(caught.value)

    assert all("is not the same on rank" in message for message in on_ranks(2, work))


def about(classes: tuple[str, ...], kind: str = RAW, shape: tuple[int, ...] | None = (8, 8)) -> Index:
    none = np.zeros(0, np.int32)
    return Index(About(kind, classes, shape), none, none, none, none, none, Path("packs/a"))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (about(("a", "b")), about(("b", "a")), "packs/a has other classes than packs/a, .*: the same in another order"),
        (about(("a", "b")), about(("a", "c")), "it lacks b; it adds c; pack samples of the same classes"),
        (about((*"a0123456",)), about(("a",)), "it lacks 0, 1, 2, 3, 4 and 2 more"),
        (about(("a",)), about(("a",), AUDIO, None), "holds audio samples, but packs/a, .*, raw samples of 8 x 8; pack"),
        (about(("a",)), about(("a",), shape=(9, 9)), "raw samples of 9 x 9"),
        (about(("a", "b"), TEXT), about(("a", "c"), TEXT), "has other tokens .*it lacks b; .* with the same --tokeniz"),
        (about(("a",), TEXT, (5,)), about(("a",), TEXT, (9,)), "text samples of 9, but .*, text samples of 5"),
    ],
)
def test_both_parts_are_of_one_data_set(train: Index, test: Index, message: str) -> None:
    check_alike(train, train)
    with pytest.raises(PackError, match=message):
        check_alike(train, test)


def augmented(folder: Path, augment: str) -> DataOptions:
    return DataOptions(pack=str(folder), augment=augment)


def test_what_cannot_be_trained_on_is_refused(on_ranks: OnRanks, numbered: Path, chirps: Path) -> None:
    with pytest.raises(
        PackError, match=r"data\.augment = 'mirror', but .* holds audio; the augmentations of these are none, sh"
    ):
        on_ranks(1, lambda world: packed_feed(augmented(chirps, "mirror"), world, 0))
    with pytest.raises(
        PackError, match=r"data\.augment = 'mask', but .* holds images; the augmentations of these are none, mir"
    ):
        on_ranks(1, lambda world: packed_feed(augmented(numbered, "mask"), world, 0))
    with pytest.raises(PackError, match=r"rank 0: \S+ is one pack without splits: .*, or give \S+/numbered$"):
        on_ranks(2, lambda world: packed_feed(DataOptions(pack=str(numbered / "train")), world, 0))
    with pytest.raises(PackError, match="2 ranks cannot form 3 groups"):
        on_ranks(2, lambda world: packed_feed(DataOptions(pack=str(numbered), groups=3), world, 0))
    streamed = DataOptions(pack=str(numbered), storage="streamed", shuffle="every:4")
    with pytest.raises(PackError, match=r'data\.shuffle = "every:4", but .* is streamed, and nothing moves between'):
        on_ranks(2, lambda world: packed_feed(streamed, world, 0))


@pytest.mark.parametrize("augment", ["none", "shift", "mask"])
def test_any_number_of_ranks_has_the_same_windows_as_one_rank(on_ranks: OnRanks, chirps: Path, augment: str) -> None:
    options = DataOptions(pack=str(chirps), augment=augment, windows=3, context=1, threads=2)
    alone = epoch_on(on_ranks, 1, options, 2)
    assert [tuple(inputs.shape) for inputs, _ in alone] == [(BATCH, 3, 120)] * 7 + [(8, 3, 120)]
    for ranks, groups in ((2, 1), (3, 1), (6, 2)):
        together = epoch_on(on_ranks, ranks, replace(options, groups=groups), 2)
        for expected, batch in zip(alone, together, strict=True):
            assert torch.equal(expected[0], batch[0])
            assert torch.equal(expected[1], batch[1])
    changed = epoch_on(on_ranks, 1, replace(options, augment="none"), 2)
    unlike = [(batch[0] != plain[0]).flatten(1).any(dim=1) for batch, plain in zip(alone, changed, strict=True)]
    assert (torch.cat(unlike).float().mean() > 0.5) == (augment != "none")


def test_from_recordings_a_network_learns_which_tones_climb(on_ranks: OnRanks, chirps: Path) -> None:
    """Windows come in their order, with their labels, and what is in the test set is heard as what was trained on."""

    def work(world: Any) -> float:
        options = DataOptions(pack=str(chirps), augment="shift", windows=4, context=4)
        feed = packed_feed(options, world, SEED)
        assert (feed.samples, feed.test_samples, feed.classes, feed.channels) == (120, 40, 2, 360)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4 * feed.channels, feed.classes))
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        for epoch in range(6):
            for inputs, labels in feed.epoch(epoch, BATCH, 0):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        right = sum(int((model(inputs).argmax(dim=1) == labels).sum()) for inputs, labels in feed.test_batches(BATCH))
        feed.close()
        return right / feed.test_samples

    assert on_ranks(1, work)[0] > 0.9


@pytest.mark.parametrize("shape", [None, (8, 6), (8, 6, 3)])
def test_images_that_are_not_square_need_a_size(shape: tuple[int, ...] | None) -> None:
    nothing = np.zeros(0, np.int32)
    about = About(IMAGE, ("a",), shape, (0.5,) * 3, (0.25,) * 3)
    index = Index(about, nothing, nothing, nothing, nothing, nothing)
    what = "images of 8 x 6, which are not square" if shape else "encoded images"
    with pytest.raises(PackError, match=rf"has {what}: set data\.size \(size= of Loader\) to the size of the inputs"):
        image_options(index, DataOptions())
    chosen = image_options(index, DataOptions(size=5, augment="scale"))
    assert (chosen.size, chosen.channels, chosen.mean, chosen.std, chosen.augment) == (
        5,
        3,
        about.mean,
        about.std,
        "scale",
    )


def test_a_mean_image_is_that_of_the_pack_where_it_is_asked_for() -> None:
    nothing = np.zeros(0, np.int32)
    about = About(IMAGE, ("a",), None, (0.5,), (0.25,), mean_image=(0.5,) * MEAN_SIDE**2)
    index, wanted = Index(about, nothing, nothing, nothing, nothing, nothing), DataOptions(size=5, mean="image")
    assert image_options(index, wanted).mean_image == about.mean_image
    assert image_options(index, DataOptions(size=5)).mean_image == ()
    with pytest.raises(PackError, match="has no mean image; pack the data again"):
        image_options(replace(index, about=replace(about, mean_image=())), wanted)


def test_reading_decoding_and_shuffling_are_observed(on_ranks: OnRanks, numbered: Path) -> None:
    """Each batch is decoded in several stretches for each thread, or in as many as it has samples."""

    def work(world: Any) -> tuple[Counter[tuple[str, str]], int]:
        spans = list[OperationSpan]()
        feed = packed_feed(DataOptions(pack=str(numbered), threads=2), world, SEED, observe=spans.append)
        assert [span.name for span in spans] == ["read training set", "read test set"]
        sizes = [len(labels) for _, labels in (*feed.epoch(0, BATCH, 0), *feed.test_batches(BATCH))]
        feed.close()
        threads = {span.thread.partition("_")[0] for span in spans if span.kind == "decoding"}
        assert threads == {"decoding", "test decoding"}
        return Counter((span.name, span.kind) for span in spans), sum(min(2 * STRETCHES, size) for size in sizes)

    steps, tests = steps_of(151, BATCH), steps_of(37, BATCH)
    for counts, stretches in on_ranks(2, work):
        assert counts == {
            ("read training set", "loading"): 1,
            ("read test set", "loading"): 1,
            ("read batch", "loading"): steps + tests,
            ("decode", "decoding"): stretches,
            ("shuffle", "shuffle"): 1,
        }


def test_a_data_set_in_memory_is_observed() -> None:
    samples = Samples(torch.zeros(10, 1, 2, 2), torch.zeros(10, dtype=torch.int64))
    spans = list[OperationSpan]()
    feed = in_memory_feed(Dataset(samples, samples, 2), SimpleNamespace(rank=0, size=1), 3, spans.append)
    list(feed.epoch(0, 4, 1))
    list(feed.test_batches(4))
    next(feed.own_batches(4, 0))
    assert [(span.name, span.kind) for span in spans] == [
        ("shuffle", "shuffle"),
        *[("read batch", "loading")] * (2 + 3 + 1),
    ]
