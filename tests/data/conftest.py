"""What the tests of data share: ranks that are threads of this process, and small packs whose samples are known."""

from __future__ import annotations

import io
import threading
import wave
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch

from unisono.data.kinds import AUDIO, RAW
from unisono.data.pack.index import Index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source, find
from unisono.placement import Placement, one_rank_per_node
from unisono.world import World

Result = TypeVar("Result")

OnRanks = Callable[[int, Callable[[Any], Result]], list[Result]]

CLASSES = ("none", "some", "many", "most", "all")


class Board:
    """Where the ranks of a world meet."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadWorld:
    """A rank of a world whose ranks are threads: as much of a World as data asks for."""

    def __init__(self, rank: int, board: Board, boards: list[Board], placement: Placement | None = None) -> None:
        self.placement = placement or one_rank_per_node(len(board.values))
        self.rank, self.size, self.node, self.nodes = rank, len(board.values), 0, len(board.values)
        self._board, self._boards = board, boards

    call_on_all = World.call_on_all

    def all_gather_object(self, value: Any) -> list[Any]:
        self._board.values[self.rank] = value
        self._board.barrier.wait()
        values = list(self._board.values)
        self._board.barrier.wait()
        return values

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        come = torch.stack([sent.reshape(self.size, -1)[self.rank] for sent in self.all_gather_object(tensor)])
        self.all_gather_object(None)  # nobody changes what another still reads
        return come.reshape(tensor.shape)

    def all_to_all_v(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        for sent, room in zip(self.all_gather_object(sends), receives, strict=True):
            assert sent[self.rank].shape == room.shape, "both ends agree on the size"
            room.copy_(sent[self.rank])
        self.all_gather_object(None)

    def split(self, color: int) -> ThreadWorld:
        members = [rank for rank, other in enumerate(self.all_gather_object(color)) if other == color]
        board = Board(len(members))
        self._boards.append(board)
        return ThreadWorld(members.index(self.rank), self.all_gather_object(board)[members[0]], self._boards)

    def node_world(self) -> ThreadWorld:
        return self.split(self.placement.node_of(self.rank))

    def free(self) -> None:
        self.all_gather_object(None)


def work_on_ranks(ranks: int, work: Callable[[Any], Result]) -> list[Result]:
    """What `work` gives on each rank; where it fails on one, that error."""
    boards = [Board(ranks)]

    def one(rank: int) -> Result:
        try:
            return work(ThreadWorld(rank, boards[0], boards))
        except BaseException:
            for board in boards:
                board.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        works = [pool.submit(one, rank) for rank in range(ranks)]
    errors = [error for each in works if (error := each.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in works]


@pytest.fixture(scope="session")
def on_ranks() -> OnRanks[Any]:
    """Calls a function on a number of ranks, each with its world."""
    return work_on_ranks


class Known(NamedTuple):
    """A pack, and the bytes of its samples."""

    index: Index
    samples: list[bytes]


def source_of(samples: Sequence[bytes], kind: str, shape: tuple[int, ...] | None = None) -> Source:
    """Samples in memory, sorted by class."""
    count = len(samples)
    labels, sizes = np.arange(count) * len(CLASSES) // count, np.array([len(sample) for sample in samples])
    return Source(kind, CLASSES, [str(index) for index in range(count)], labels, sizes, samples.__getitem__, shape)


def known(samples: list[bytes], folder: Path, kind: str, shape: tuple[int, ...] | None = None) -> Known:
    return Known(pack(source_of(samples, kind, shape), folder, PackOptions(stripes=3), 1, lambda: None), samples)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """61 samples of two bytes: their numbers."""
    samples = [index.to_bytes(2, "little") for index in range(61)]
    return known(samples, tmp_path_factory.mktemp("packs") / "tiny", RAW, (1, 2))


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """2,000 of the same kind."""
    samples = [index.to_bytes(2, "little") for index in range(2000)]
    return known(samples, tmp_path_factory.mktemp("packs") / "many", RAW, (1, 2))


def wav_of(samples: Any, rate: int = 8000) -> bytes:
    """The file of a recording: numbers of 16 bits, (samples,) or (samples, channels)."""
    numbers = np.asarray(samples, np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if numbers.ndim == 1 else numbers.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(numbers.tobytes())
    return file.getvalue()


@pytest.fixture(scope="session")
def wav() -> Callable[..., bytes]:
    """Makes the file of a recording."""
    return wav_of


@pytest.fixture(scope="session")
def audio_samples(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """47 samples of many lengths."""

    def sound(index: int) -> bytes:
        return wav_of(np.random.default_rng(index).integers(-(2**15), 2**15, 1 + 7 * index % 40))

    return known([sound(index) for index in range(47)], tmp_path_factory.mktemp("packs") / "sounds", AUDIO)


@pytest.fixture(scope="session")
def chirps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of tones that climb or fall, 120 to train on and 40 in the test set, packed from a table."""
    folder = tmp_path_factory.mktemp("recordings")
    rows = ["path,label,split"]
    for index in range(160):
        chance = np.random.default_rng(index)
        times = np.arange(int(chance.integers(1600, 4000))) / 8000
        low, high = chance.uniform(300, 800), chance.uniform(1500, 3000)
        climbs = index % 2 == 0
        heights = low + (high - low) * (times if climbs else times[::-1]) / times[-1]
        tone = np.sin(2 * np.pi * np.cumsum(heights) / 8000) + 0.05 * chance.standard_normal(len(times))
        (folder / f"{index}.wav").write_bytes(wav_of(8000 * tone))
        rows.append(f"{index}.wav,{'up' if climbs else 'down'},{'test' if index % 8 > 5 else 'train'}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    packs = tmp_path_factory.mktemp("packs") / "chirps"
    for name, part in find(folder / "table.csv").items():
        pack(part, packs / name, PackOptions(stripes=3), 1, lambda: None)
    return packs


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey images of 8 x 8, 151 to train on and 37 in the test set, whose first two pixels are their number."""
    folder = tmp_path_factory.mktemp("packs") / "numbered"
    for part, count in (("train", 151), ("test", 37)):
        image_samples = [
            bytes((index % 256, index // 256)) + np.random.default_rng(index).bytes(62) for index in range(count)
        ]
        pack(source_of(image_samples, RAW, (8, 8)), folder / part, PackOptions(stripes=3), 1, lambda: None)
    return folder
