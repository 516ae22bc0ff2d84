from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unisono.data import loading
from unisono.data.kinds import IMAGE, RAW, SampleTransform
from unisono.data.kinds.image import ImageOptions, RawKind
from unisono.data.kinds.image_transform import ImageDecoder, ImageTransform, RawDecoder
from unisono.data.loading import PREFETCHED_BATCHES, Prefetcher
from unisono.data.order import DRAWS_PER_SAMPLE, CounterRNG, uniform_numbers
from unisono.data.pack.index import About, Index
from unisono.errors import DecodeError

COUNT = 300
SHAPE = (8, 8, 3)
PICTURES = [np.random.default_rng(seed).bytes(8 * 8 * 3) for seed in range(COUNT)]
VIEW = ImageOptions(8, 3, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "shift")


class Listed:
    """Samples in a list, and what was asked for."""

    def __init__(self, samples: list[bytes]) -> None:
        self.held, self.asked = samples, list[list[int]]()

    def samples(self, numbers: np.ndarray) -> list[np.ndarray]:
        self.asked.append(numbers.tolist())
        return [np.frombuffer(bytearray(self.held[sample]), np.uint8) for sample in numbers.tolist()]

    def stop(self) -> None:
        """There are no threads."""

    def close(self) -> None:
        """There is nothing to free."""


@contextmanager
def loader_of(
    samples: list[bytes],
    view: ImageOptions = VIEW,
    threads: int = 2,
    show: Callable[..., SampleTransform] = ImageTransform,
) -> Iterator[tuple[Prefetcher, Listed]]:
    raw = samples is PICTURES
    about = About(RAW if raw else IMAGE, ("a", "b", "c"), SHAPE if raw else None, view.mean, view.std)
    nothing = np.zeros(len(samples), np.int32)
    lengths = np.array([len(sample) for sample in samples], np.int32)
    labels = (np.arange(len(samples)) % 3).astype(np.int32)
    memory = Listed(samples)
    loader = Prefetcher(
        Index(about, nothing, nothing, nothing, lengths, labels, Path("pack")),
        memory,
        lambda: show(view, RawDecoder(SHAPE) if raw else ImageDecoder(view.channels)),
        threads,
    )
    try:
        yield loader, memory
    finally:
        loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decoding")]


def shown(index: int, throws: CounterRNG | None, view: ImageOptions = VIEW) -> torch.Tensor:
    """An image as one thread shows it."""
    out = torch.empty(8, 8, 3)
    ImageTransform(view, RawDecoder(SHAPE)).into(out, memoryview(bytearray(PICTURES[index])), throws)
    return out.permute(2, 0, 1)


def numbers_of(*batches: list[int]) -> list[np.ndarray]:
    return [np.array(batch, np.int64) for batch in batches]


def test_batches_come_in_order_and_right_under_many_threads() -> None:
    chance = np.random.default_rng(0)
    wanted = [chance.permutation(COUNT)[: chance.integers(0, 40)] for _ in range(60)]
    wanted[5] = wanted[5][:0]
    expected = {
        index: shown(index, CounterRNG(uniform_numbers(3, 2, np.array([index]), DRAWS_PER_SAMPLE)[0].tolist()))
        for index in range(COUNT)
    }
    with loader_of(PICTURES, threads=16) as (loader, memory):
        came = 0
        for numbers, (inputs, labels) in zip(wanted, loader.batches(wanted, 3, 2), strict=True):
            assert inputs.shape == (len(numbers), 3, 8, 8)
            assert labels.tolist() == [index % 3 for index in numbers]
            assert labels.dtype == torch.int64
            for image, index in zip(inputs, numbers.tolist(), strict=True):
                assert torch.equal(image, expected[index])
            came += 1
        assert came == 60
        assert memory.asked == [numbers.tolist() for numbers in wanted]


def test_what_is_random_follows_from_seed_epoch_and_number_alone() -> None:
    everything = np.arange(COUNT)
    image_samples: dict[tuple[int, int], list[torch.Tensor]] = {}
    for threads, batch in ((1, 300), (3, 7)):
        with loader_of(PICTURES, threads=threads) as (loader, _):
            for seed, epoch in ((0, 0), (0, 1), (1, 0)):
                backwards = [everything[::-1][first : first + batch].copy() for first in range(0, COUNT, batch)]
                batches = loader.batches(backwards if threads > 1 else [everything], seed, epoch)
                came = torch.cat([inputs.clone() for inputs, _ in batches])
                image_samples.setdefault((seed, epoch), []).append(came.flip(0) if threads > 1 else came)
    assert all(torch.equal(once, again) for once, again in image_samples.values())
    first = image_samples[0, 0][0]
    assert all((first != image_samples[key][0]).flatten(1).any(dim=1).float().mean() > 0.5 for key in ((0, 1), (1, 0)))


def test_validation_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*_: object) -> np.ndarray:
        raise AssertionError("random numbers were drawn")

    monkeypatch.setattr(loading, "uniform_numbers", drawn)
    with loader_of(PICTURES) as (loader, _):
        (inputs, _labels), *_ = loader.batches([np.arange(20)])
        for index in range(20):
            assert torch.equal(inputs[index], shown(index, None))
        with pytest.raises(AssertionError, match="random numbers were drawn"):
            next(loader.batches([np.arange(20)], 1, 1))


def test_a_kind_without_augmentations_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RawKind, "augments", ("none",))
    monkeypatch.setattr(loading, "uniform_numbers", None)
    with loader_of(PICTURES) as (loader, _):
        (inputs, _labels), *_ = loader.batches([np.arange(20)], 1, 1)
        assert torch.equal(inputs[3], shown(3, None))


def test_a_batch_keeps_its_memory_until_the_next_one_is_asked_for_and_then_gives_it_on() -> None:
    wanted = [np.arange(first, first + 10) for first in range(0, COUNT, 10)]
    with loader_of(PICTURES) as (loader, _):
        for _ in range(2):
            held = [(inputs, inputs.data_ptr()) for inputs, _ in loader.batches(wanted)]
            places = [place for _, place in held]
            for index, place in enumerate(places):
                assert place not in places[index + 1 : index + 2 + PREFETCHED_BATCHES], (
                    "begun before the next one was shown"
                )
            assert len(set(places)) <= PREFETCHED_BATCHES + 2


def test_a_batch_stays_while_the_next_ones_are_made() -> None:
    made = threading.Semaphore(0)

    class Spy(ImageTransform):
        def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:
            super().into(out, file, random)
            made.release()

    wanted = [np.arange(first, first + 10) for first in range(0, COUNT, 10)]
    with loader_of(PICTURES, show=Spy) as (loader, memory):
        begun = 0
        for numbers, (inputs, _) in zip(wanted, loader.batches(wanted), strict=True):
            for _ in range(10 * (len(memory.asked) - begun)):
                assert made.acquire(timeout=60)
            begun = len(memory.asked)
            assert torch.equal(inputs[9], shown(int(numbers[9]), None))
        assert begun == len(wanted)


def test_the_last_batch_stays_until_one_of_the_next_iterator_is_there() -> None:
    with loader_of(PICTURES) as (loader, _):
        for steps in (1, 2):
            *_, (last, _labels) = loader.batches([np.array([sample, 3]) for sample in range(steps)])
            kept = last.clone()
            other = loader.batches([np.array([9, 8])] * steps)
            next(other)
            assert torch.equal(last, kept)
            other.close()


def test_closing_the_iterator_stops_the_loading() -> None:
    source = iter([np.arange(first, first + 10) for first in range(0, COUNT, 10)])
    with loader_of(PICTURES) as (loader, memory):
        batches = loader.batches(source, 0)
        next(batches)
        batches.close()
        assert len(memory.asked) == 1 + PREFETCHED_BATCHES
        assert next(source).tolist() == list(range(10 * (1 + PREFETCHED_BATCHES), 10 * (2 + PREFETCHED_BATCHES))), (
            "no more was taken"
        )
        (inputs, _), *rest = loader.batches(numbers_of([4]))
        assert torch.equal(inputs[0], shown(4, None))
        assert rest == []


@pytest.mark.parametrize("broken", [b"no picture", b"\xff\xd8 begins like a JPEG", b""])
def test_a_sample_that_is_no_image_is_named_and_the_loader_continues(broken: bytes) -> None:
    def png(level: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.full((8, 8), 20 * level, np.uint8)).save(file, "PNG")
        return file.getvalue()

    samples = [png(level) for level in range(12)]
    samples[7] = broken
    with loader_of(samples, ImageOptions(8, 1, (0.0,), (1.0,))) as (loader, _):
        batches = loader.batches(numbers_of([0, 1, 2], [3, 4], [6, 7, 8], [9]), 0)
        assert [labels.tolist() for _, labels in (next(batches), next(batches))] == [[0, 1, 2], [0, 1]]
        with pytest.raises(DecodeError, match=r"^sample 7 of pack: \S"):
            next(batches)
        assert next(batches, None) is None
        ((inputs, _),) = loader.batches(numbers_of([8, 11]))
        assert (inputs[:, 0, 3, 3] * 255).round().tolist() == [160, 220]


def test_samples_have_the_shape_and_the_layout_that_what_shows_them_says() -> None:
    class Rows:
        """Two rows of three numbers, handed out as three of two."""

        shape = 2, 3

        def __init__(self, *_: object) -> None:
            """There is nothing to be known."""

        def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:
            out.copy_(torch.tensor(list(file[:6])).view(2, 3) + (0.5 if random else 0))

        def batch(self, memory: torch.Tensor) -> torch.Tensor:
            return memory.transpose(1, 2)

    with loader_of(PICTURES, show=Rows) as (loader, _):
        assert loader.shape == (2, 3)
        for seed, more in ((None, 0), (0, 0.5)):
            ((inputs, labels),) = loader.batches(numbers_of([7, 3]), seed)
            assert inputs.shape == (2, 3, 2)
            assert inputs[1, :, 1].tolist() == [value + more for value in PICTURES[3][3:6]]
            assert labels.tolist() == [1, 0]


def test_numbers_lie_as_channels_last() -> None:
    with loader_of(PICTURES) as (loader, _):
        ((inputs, _),) = loader.batches([np.arange(6)])
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(inputs[5], shown(5, None))


def test_a_free_thread_takes_what_a_slow_one_has_not_begun() -> None:
    free, others = threading.Event(), set[int]()

    class Slow(ImageTransform):
        def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:
            index = PICTURES.index(bytes(file))
            if index == 0:
                assert free.wait(10), "all but this stretch is the other thread's"
            others.add(index)
            if others >= set(range(6, 48)):
                free.set()
            super().into(out, file, random)

    with loader_of(PICTURES, show=Slow) as (loader, _):
        list(loader.batches([np.arange(48)]))
    assert others == set(range(48))


def test_each_thread_works_alone_and_leaves_the_others_their_cores() -> None:
    seen = set[int]()

    class Spy(ImageTransform):
        def into(self, out: torch.Tensor, file: memoryview, random: CounterRNG | None) -> None:
            seen.add(torch.get_num_threads())
            super().into(out, file, random)

    mine = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with loader_of(PICTURES, show=Spy) as (loader, _):
            list(loader.batches([np.arange(50)], 0))
            assert torch.get_num_threads() == 2
        assert seen == {1}
    finally:
        torch.set_num_threads(mine)
