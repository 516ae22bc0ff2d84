"""Measures one loader in a process of its own: time to the first batch, images/s, memory. Started by peers.py.

All decode each JPEG, take a part of random place and scale, scale it to 224 x 224, mirror half of them, normalise, and
put 32 into a batch of float32 tensors, in an order that is new in each epoch.

python peer.py NAME DATA CORES      NAME: a key of LOADERS; DATA: what peers.py has prepared
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from unisono.data.kinds.image import ImageOptions, choose_augmentation

BATCH, SIZE = 32, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPTIONS = ImageOptions(SIZE, 3, MEAN, STD, "scale")

Epoch = Callable[[], Iterator[Any]]
"""Batches of the next epoch."""

Construct = Callable[[], Epoch]
"""Makes a loader, in a process that has imported all that it needs."""


def normalised(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return pixels as a float32 tensor of 3 planes."""
    image = torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255)
    return image.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))


def by_pillow(image: Image.Image) -> torch.Tensor:
    """Return the sample of an image that Pillow decodes, as most training scripts do."""
    colored = image.convert("RGB")
    augmentation = choose_augmentation(OPTIONS, *colored.size, random.Random(random.random()))
    x, y, width, height = augmentation.box
    scaled = colored.resize((SIZE, SIZE), Image.Resampling.BILINEAR, (x, y, x + width, y + height))
    if augmentation.mirrored:
        scaled = scaled.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return normalised(np.array(scaled))


def by_opencv(jpeg: bytes) -> torch.Tensor:
    """Return the sample of a JPEG that OpenCV decodes, the fastest decoder that these libraries' users have by pip."""
    image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    augmentation = choose_augmentation(OPTIONS, image.shape[1], image.shape[0], random.Random(random.random()))
    x, y, width, height = augmentation.box
    scaled = cv2.resize(image[y : y + height, x : x + width], (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
    if augmentation.mirrored:
        scaled = cv2.flip(scaled, 1)
    return normalised(cv2.cvtColor(scaled, cv2.COLOR_BGR2RGB))


class Files(Dataset[tuple[torch.Tensor, int]]):
    """Images as files in folders of their class."""

    def __init__(self, folder: Path, read: Callable[[Path], torch.Tensor]) -> None:
        classes = sorted(each for each in folder.iterdir() if each.is_dir())
        self.each = [(file, label) for label, each in enumerate(classes) for file in sorted(each.iterdir())]
        self.read = read

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.each[index]
        return self.read(file), label


def read_by_pillow(file: Path) -> torch.Tensor:
    """Return the sample of a file, by Pillow."""
    with Image.open(file) as image:
        return by_pillow(image)


def read_by_opencv(file: Path) -> torch.Tensor:
    """Return the sample of a file, by OpenCV."""
    return by_opencv(file.read_bytes())


def unisono(storage: str) -> Callable[[Path, int], Construct]:
    """Return our loader, with as many decoding threads as cores."""

    def imported(data: Path, cores: int) -> Construct:
        import unisono as ours  # noqa: PLC0415  starts MPI
        import unisono.data.storage.choose  # noqa: PLC0415  as the others' imports, before the clock starts

        world, options = ours.init(), {"buffer_megabytes": 8} if storage == "streamed" else {}

        def construct() -> Epoch:
            loader = ours.data.Loader(
                data / "pack", world, BATCH, storage=storage, size=SIZE, augment="scale", threads=cores, **options
            )
            return lambda: iter(loader)

        return construct

    return imported


def files(read: Callable[[Path], torch.Tensor]) -> Callable[[Path, int], Construct]:
    """Return PyTorch's DataLoader over files."""

    def imported(data: Path, cores: int) -> Construct:
        def construct() -> Epoch:
            loader = DataLoader(Files(data / "files", read), BATCH, shuffle=True, **workers(cores))
            return lambda: iter(loader)

        return construct

    return imported


def streaming(data: Path, cores: int) -> Construct:
    """Return MosaicML Streaming over shards of JPEGs on the local disk, decoded by OpenCV."""
    no_torchvision()
    from streaming.base.util import clean_stale_shared_memory  # noqa: PLC0415

    from streaming import StreamingDataset  # noqa: PLC0415  is not in every environment

    class Shards(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return by_opencv(sample["jpeg"]), sample["label"]

    def construct() -> Epoch:
        shards = Shards(local=str(data / "mds"), shuffle=True, batch_size=BATCH)
        loader = DataLoader(shards, BATCH, **workers(cores))
        return lambda: iter(loader)

    clean_stale_shared_memory()
    return construct


def webdataset(data: Path, cores: int) -> Construct:
    """Return WebDataset over tar files on the local disk, decoded by OpenCV, shuffled through a buffer of 1,000."""
    import webdataset as wds  # noqa: PLC0415  is not in every environment

    tars = sorted(str(each) for each in (data / "tars").iterdir())

    def construct() -> Epoch:
        shards = wds.WebDataset(tars, shardshuffle=len(tars)).shuffle(1000).to_tuple("jpg", "cls")
        shards = shards.map_tuple(by_opencv, int).batched(BATCH)
        loader = wds.WebLoader(shards, batch_size=None, **workers(cores))
        return lambda: iter(loader)

    return construct


LOADERS: dict[str, Callable[[Path, int], Construct]] = {
    "unisono": unisono("partitioned"),
    "unisono, streamed": unisono("streamed"),
    "DataLoader, Pillow": files(read_by_pillow),
    "DataLoader, OpenCV": files(read_by_opencv),
    "Streaming, OpenCV": streaming,
    "WebDataset, OpenCV": webdataset,
}


def workers(cores: int) -> dict[str, Any]:
    """Return the DataLoader's arguments: no worker on one core, where it would only copy; else one for each core."""
    return {"num_workers": cores, "persistent_workers": True} if cores > 1 else {"num_workers": 0}


def no_torchvision() -> None:
    """Let Streaming be imported without torchvision, of which this comparison uses nothing."""
    try:
        import torchvision  # noqa: F401, PLC0415
    except ImportError:
        names = {"datasets": ("VisionDataset", "CIFAR10"), "transforms.functional": ("to_tensor",), "transforms": ()}
        sys.modules["torchvision"] = types.ModuleType("torchvision")
        sys.modules["torchvision"].__spec__ = ModuleSpec("torchvision", None)
        for name, inside in names.items():
            module = sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            for each in inside:
                setattr(module, each, type(each, (), {}))


def memory() -> int:
    """Return the bytes of this process and its workers, shared pages in proportion."""
    pid = str(os.getpid())
    processes = [pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            total += int(line.split()[1]) << 10 if line.startswith("Pss:") else 0
    return total


def main(name: str, data: str, cores: str) -> None:
    """Load two epochs, and print what was found; the first finds files and code for the first time."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: int(cores)]))
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    construct = LOADERS[name](Path(data), int(cores))
    before, begun = memory(), time.perf_counter()
    epoch = construct()
    first, middle, half = 0.0, 0, sum(1 for _ in (Path(data) / "files").rglob("*.jpg")) // BATCH // 2
    for step, _ in enumerate(epoch()):
        first = first or time.perf_counter() - begun
        middle = memory() if step == half else middle
    begun, images = time.perf_counter(), 0
    for inputs, _ in epoch():
        images += len(inputs)
        assert tuple(inputs.shape[1:]) == (3, SIZE, SIZE)
    seconds = time.perf_counter() - begun
    facts = {"first_batch_s": first, "images_per_second": images / seconds, "bytes": middle - before, "images": images}
    print("found " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
