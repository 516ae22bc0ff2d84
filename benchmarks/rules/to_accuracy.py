"""Time to 85% on Fashion-MNIST over a slow link: BSP in float32, DiLoCo in 4 bits.

unisono lab --hosts 4 --rate 5mbit -- python benchmarks/rules/to_accuracy.py FASHION_MNIST OUT.json 5000000 0 1 2

FASHION_MNIST is the folder of the four IDX files; the numbers at the end are seeds. All ranks draw the same order of
the training images, and each trains on its part of every batch. Both rules have the same network, batch and learning
rates. The clock stands still during evaluations, and their bytes do not count.

computing    median seconds of a step without any exchange, on all ranks at once
exchange     median seconds of a step of BSP - computing
bytes        bytes that the network device of a rank's host has sent, as the mean over ranks
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono
from unisono.rules import BSP, BaseRule, DiLoCo, Exchange
from unisono.world import World

TARGET = 0.85
BATCH, RATE, WARM, DECAY = 128, 0.05, 32, 608
"""Samples of a step on all ranks, the learning rate, the steps until it is reached, the steps until it is 0."""

EVERY = 16
"""Steps between two evaluations, and of a period of DiLoCo."""

BSP_STEPS = 600
MOST_STEPS = {"bsp": BSP_STEPS, "diloco": 4 * BSP_STEPS}


def network() -> nn.Module:
    """Return a network of 105,866 weights for images of shape (samples, 1, 28, 28)."""
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10))


def rules() -> dict[str, BaseRule]:
    """Return the rules by name."""
    return {
        "bsp": BSP(Exchange(), "chain"),
        "diloco": DiLoCo(Exchange(wire="int4"), "chain", every=EVERY, outer_rate=0.7, outer_momentum=0.8, fragments=4),
    }


def read_images(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalised images of shape (samples, 1, 28, 28), and labels."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8).long()
    return (images / 255 - 0.286) / 0.353, labels


def rate(step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine to a tenth."""
    if step < WARM:
        return RATE * (step + 1) / WARM
    return RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, (step - WARM) / (DECAY - WARM)))) / 2)


def bytes_sent() -> int:
    """Return the bytes that this host's network devices have sent, without loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


class Run:
    """Training of a new network under a rule."""

    def __init__(self, world: World, rule: BaseRule, seed: int, data: dict[str, tuple[torch.Tensor, torch.Tensor]]):
        torch.manual_seed(seed)
        self.world, self.data = world, data
        self.model = network()
        optimizer = torch.optim.SGD(self.model.parameters(), RATE, momentum=0.9, weight_decay=5e-4)
        self.trainer = unisono.Trainer(self.model, world, rule, optimizer)
        self.order = torch.randperm(len(data["train"][1]), generator=torch.Generator().manual_seed(seed))
        self.step = 0

    def train(self, steps: int) -> float:
        """Make some steps. Return the seconds until all ranks are done with them."""
        images, labels = self.data["train"]
        share = BATCH // self.world.size
        self.world.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            first = (self.step * BATCH + self.world.rank * share) % (len(self.order) - BATCH)
            chosen = self.order[first : first + share]
            self.trainer.optimizer.param_groups[0]["lr"] = rate(self.step)
            self.trainer.step(images[chosen], labels[chosen])
            self.step += 1
        self.trainer.wait()
        return max(self.world.all_gather_object(time.perf_counter() - began))

    def accuracy(self) -> float:
        """Return the accuracy on the test images, each rank evaluating a part."""
        images, labels = (tensor[self.world.rank :: self.world.size] for tensor in self.data["test"])
        score = self.trainer.evaluate(zip(images.split(500), labels.split(500), strict=True), len(self.data["test"][1]))
        return score.top1

    def to_target(self, most: int) -> dict[str, Any]:
        """Train until the target or `most` steps. Return seconds, steps, bytes of a step, and the curve."""
        seconds, sent, curve = 0.0, 0, list[tuple[int, float, float]]()
        while self.step < most:
            before = bytes_sent()
            seconds += self.train(EVERY)
            sent += bytes_sent() - before
            curve.append((self.step, round(seconds, 3), self.accuracy()))
            if curve[-1][2] >= TARGET:
                break
        mean = statistics.mean(self.world.all_gather_object(sent / self.step))
        reached = curve[-1][2] >= TARGET
        return {"reached": reached, "steps": self.step, "seconds": seconds, "bytes_a_step": mean, "curve": curve}


def step_seconds(run: Run, steps: int = 8) -> float:
    """Return the median seconds of a step, without the first two."""
    return statistics.median([run.train(1) for _ in range(steps)][2:])


def main(folder: str, output: str, link: str, *seeds: str) -> None:
    """Measure computing and exchange, then train by each rule with each seed."""
    world = unisono.init()
    torch.set_num_threads(1)
    data = {"train": read_images(Path(folder), "train"), "test": read_images(Path(folder), "t10k")}
    never = DiLoCo(Exchange(), "chain", every=1 << 20)
    computing = step_seconds(Run(world, never, 0, data), 12)
    exchange = step_seconds(Run(world, rules()["bsp"], 0, data)) - computing
    facts: dict[str, Any] = {"hosts": world.size, "rate_bits": float(link), "computing_s": computing}
    facts |= {"bsp_exchange_s": exchange, "exchange_to_computing": exchange / computing, "seeds": {}}
    if world.rank == 0:
        print(f"computing {1e3 * computing:.1f} ms, exchange {1e3 * exchange:.1f} ms: {exchange / computing:.1f} times")
    for seed in map(int, seeds):
        rows = {name: Run(world, rule, seed, data).to_target(MOST_STEPS[name]) for name, rule in rules().items()}
        bsp, diloco = rows["bsp"], rows["diloco"]
        facts["seeds"][seed] = rows
        facts["seeds"][seed]["time"] = diloco["seconds"] / bsp["seconds"]
        facts["seeds"][seed]["bytes"] = bsp["bytes_a_step"] / diloco["bytes_a_step"] if diloco["bytes_a_step"] else 0.0
        if world.rank == 0:
            for name in rules():
                row = rows[name]
                reached = f"{row['curve'][-1][2]:.2%} after {row['steps']} steps, {row['seconds']:.0f} s"
                print(f"seed {seed}: {name} {reached}, {row['bytes_a_step']:.0f} bytes a step", flush=True)
            print(f"seed {seed}: time {rows['time']:.3f}, bytes {rows['bytes']:.1f} times fewer", flush=True)
            Path(output).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
