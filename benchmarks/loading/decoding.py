"""Images/s of one core: ours, PyTorch's DataLoader with Pillow and with OpenCV, and libjpeg-turbo alone.

Started by run.py:  decoding.py OUTPUT PACK FOLDER SIZE
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from unisono.data.kinds.image import ImageAugmentation, ImageOptions, choose_augmentation, part_of
from unisono.data.kinds.image_transform import ImageDecoder, ImageTransform, JpegDecoder
from unisono.data.loading import Prefetcher
from unisono.data.order import DRAWS_PER_SAMPLE, CounterRNG, uniform_numbers
from unisono.data.pack.index import Index, read_index
from unisono.data.pack.stripe import read_stretch

BATCH, ROUNDS = 32, 7


class OneProcess:
    """All samples of a pack in the memory of this process."""

    def __init__(self, index: Index) -> None:
        self.each = [
            data[start:stop]
            for data, offsets in read_stretch(index, 0, len(index))
            for start, stop in pairwise(offsets.tolist())
        ]

    def samples(self, numbers: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The bytes of samples."""
        return [self.each[index] for index in numbers.tolist()]

    def stop(self) -> None:
        """End nothing: there are no threads, and no files."""

    close = stop


class Files(Dataset[tuple[torch.Tensor, int]]):
    """The same images as files, with the same crops and size."""

    def __init__(
        self, files: list[Path], labels: list[int], options: ImageOptions, read: Callable[[Path, Files, int], Any]
    ) -> None:
        self.files, self.labels, self.options, self.read, self.round = files, labels, options, read, 0
        self.mean = torch.tensor(options.mean).view(3, 1, 1)
        self.std = torch.tensor(options.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.files)

    def augmentation(self, index: int, width: int, height: int) -> ImageAugmentation:
        """Augmentation of this image in this round, as ours has it."""
        return choose_augmentation(self.options, width, height, numbers_of(self.round, index))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.from_numpy(self.read(self.files[index], self, index)).permute(2, 0, 1)
        return image.float().div_(255).sub_(self.mean).div_(self.std), self.labels[index]


def numbers_of(turn: int, index: int) -> CounterRNG:
    """Random numbers of this image in this round, as ours has them."""
    return CounterRNG(uniform_numbers(0, turn, np.array([index]), DRAWS_PER_SAMPLE)[0].tolist())


def by_pillow(file: Path, files: Files, index: int) -> Any:
    """As most training scripts do."""
    with Image.open(file) as image:
        colored = image.convert("RGB")
    augmentation = files.augmentation(index, *colored.size)
    x, y, width, height = augmentation.box
    size = files.options.size
    scaled = colored.resize((size, size), Image.Resampling.BILINEAR, (x, y, x + width, y + height))
    if augmentation.mirrored:
        scaled = scaled.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(scaled)


def by_opencv(file: Path, files: Files, index: int) -> Any:
    """As those do that are in a hurry."""
    image = cv2.imread(str(file))
    augmentation = files.augmentation(index, image.shape[1], image.shape[0])
    x, y, width, height = augmentation.box
    size = files.options.size
    scaled = cv2.resize(image[y : y + height, x : x + width], (size, size), interpolation=cv2.INTER_LINEAR)
    if augmentation.mirrored:
        scaled = cv2.flip(scaled, 1)
    return cv2.cvtColor(scaled, cv2.COLOR_BGR2RGB)


def main(output: str, pack: str, folder: str, size: str) -> None:
    """All contenders by turns, each over all images in every round."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core for all, whatever threads they have
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    index = read_index(Path(pack))
    memory = OneProcess(index)
    options = ImageOptions(int(size), 3, index.about.mean, index.about.std, "scale")
    numbers = np.arange(len(index))
    batches = [numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)]
    files = [Path(folder) / key for key in keys_of(index)]
    labels = index.label.tolist()
    pillow, opencv = (Files(files, labels, options, read) for read in (by_pillow, by_opencv))
    loader = Prefetcher(index, memory, lambda: ImageTransform(options, ImageDecoder(3)), threads=1)
    decoder = JpegDecoder()

    def ours(turn: int) -> float:
        begun = time.perf_counter()
        for _ in loader.batches(batches, 0, turn):
            pass
        return time.perf_counter() - begun

    def peer(data: Files, turn: int) -> float:
        data.round = turn
        begun = time.perf_counter()
        for _ in DataLoader(data, BATCH):
            pass
        return time.perf_counter() - begun

    def bare(turn: int) -> float:
        parts = []
        for sample in numbers.tolist():
            file = memory.each[sample].tobytes()
            header = decoder.header(file)
            assert header is not None
            assert header.block is not None
            box = choose_augmentation(options, header.width, header.height, numbers_of(turn, sample)).box
            parts.append((file, part_of(box, header.width, header.height, header.block, options.size)[0]))
        begun = time.perf_counter()
        for file, part in parts:
            decoder.header(file)
            decoder.decode(file, part, grey=False)
        return time.perf_counter() - begun

    contenders: dict[str, Callable[[int], float]] = {
        "ours": ours,
        "DataLoader, Pillow": lambda turn: peer(pillow, turn),
        "DataLoader, OpenCV": lambda turn: peer(opencv, turn),
        "libjpeg-turbo alone": bare,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(ROUNDS + 1):
        for name, contender in contenders.items():
            took = contender(turn)
            if turn:  # the first finds files and code for the first time
                seconds[name].append(took)
    medians = {name: len(numbers) / statistics.median(each) for name, each in seconds.items()}
    spread = {name: [len(numbers) / max(each), len(numbers) / min(each)] for name, each in seconds.items()}
    results = {"images": len(numbers), "size": int(size), "images_per_second": medians, "spread": spread}
    Path(output).write_text(json.dumps(results, indent=1) + "\n")
    loader.close()


def keys_of(index: Index) -> list[str]:
    """The files that the samples come from."""
    keys: list[str] = []
    for name, _ in index.about.stripes:
        with pa.memory_map(str(index.folder / name)) as file:
            keys += pa.ipc.open_file(file).read_all()["key"].to_pylist()
    return keys


if __name__ == "__main__":
    main(*sys.argv[1:])
