"""Training on 2 ranks: fed from a pack in memory, and from files that are read each epoch. Started by epochs.py."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from decoding import keys_of
from files import Files
from torch.utils.data import DataLoader

import unisono
from unisono.data.feed import packed_feed
from unisono.data.kinds.image import image_options
from unisono.data.options import DataOptions
from unisono.data.order import permutation, share, steps_of
from unisono.data.pack.index import read_index
from unisono.models import MODELS

BATCH, STEPS, ROUNDS = 128, 40, 3

BEFORE = 5
"""Steps that are not timed."""

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def main(output: str, pack: str, folder: str) -> None:
    """STEPS steps each by turns, ROUNDS times, after some that are not timed, in which workers start."""
    world = unisono.init()
    options = DataOptions(pack=pack, size=32, augment="shift")
    index = read_index(Path(pack) / "train")
    feed = packed_feed(options, world, 0)
    files = Files(Path(folder), keys_of(index), index.label.tolist(), image_options(index, options))
    model = MODELS.load("resnet20")(feed.classes, feed.channels)
    trainer = unisono.Trainer(model, world, unisono.BSP(unisono.Exchange()), torch.optim.SGD(model.parameters(), 0.1))
    steps = steps_of(len(index), BATCH)

    def from_files(workers: int, epoch: int) -> Batches:
        order = permutation(len(files), 0, epoch)
        shares = [share(order, BATCH, step, world.rank, world.size).tolist() for step in range(steps)]
        context = "spawn" if workers else None  # a fork after MPI has started may hang
        return iter(DataLoader(files, batch_sampler=shares, num_workers=workers, multiprocessing_context=context))

    contenders: dict[str, Callable[[int], Batches]] = {
        "pack in memory": lambda epoch: feed.epoch(epoch, BATCH, 0),
        "files, DataLoader": lambda epoch: from_files(0, epoch),
        "files, DataLoader with a worker for each rank": lambda epoch: from_files(1, epoch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    waited: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(30):  # how gradients meet is found out before anything is timed
        trainer.step(torch.zeros(BATCH // world.size, 3, 32, 32), torch.zeros(BATCH // world.size, dtype=torch.int64))
    trainer.wait()
    for turn in range(ROUNDS):
        for name, source in contenders.items():
            batches, waiting = source(turn), 0.0
            for _ in range(BEFORE):
                trainer.step(*next(batches))
            world.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                before = time.perf_counter()
                inputs, labels = next(batches)
                waiting += time.perf_counter() - before
                trainer.step(inputs, labels)
            trainer.wait()
            seconds[name].append(max(world.all_gather_object(time.perf_counter() - begun)) * steps / STEPS)
            waited[name].append(max(world.all_gather_object(waiting)) / (seconds[name][-1] * STEPS / steps))
            del batches
            if world.rank == 0:
                print(f"{name}: {seconds[name][-1]:.1f} s, waits {waited[name][-1]:.1%}", flush=True)
    results = {
        "ranks": world.size,
        "epoch_s": {name: statistics.median(each) for name, each in seconds.items()},
        "waited_for_data": {name: statistics.median(each) for name, each in waited.items()},
        "seconds": seconds,
    }
    if world.rank == 0:
        Path(output).write_text(json.dumps(results, indent=1) + "\n")
    feed.close()
