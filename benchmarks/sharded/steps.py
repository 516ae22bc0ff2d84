"""Times of a step under BSP and Sharded in the lab; computing is slept, the link needs `ratio` times as long.

unisono lab --hosts 4 --rate 100mbit -- python benchmarks/sharded/steps.py OUT.json 100000000 [NETWORK ...]

Both rules have the schedule `ring`, the overlap and the buckets that their own search found, and SGD with momentum. The
bound is the larger of computing and of one exchange of all gradients alone, in the same run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import unisono
from unisono.rules import BSP, BaseRule, Exchange, Sharded
from unisono.world import World

sys.path.insert(0, str(Path(__file__).parents[1] / "overlaps"))
from layers import NETWORKS
from steps import TOTAL, Network, Pass, exchange_alone, no_loss, search, trainer_step

RATIOS = (0.5, 1.0, 2.0)
SCHEDULE = Exchange("ring")
"""Schedule of both rules: the ring has all three collectives, each near the limit of the link on four hosts."""

ROUNDS = 5


def trainer_of(network: Network, world: World, rule: BaseRule) -> unisono.Trainer:
    """Return a trainer of a network, whose search for a setting is over."""
    optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9)
    trainer = unisono.Trainer(network, world, rule, optimizer, no_loss)
    network.passing = Pass(lambda: time.perf_counter() - trainer.reducer.times.waiting)
    search(trainer)
    return trainer


def measure(world: World, name: str, ratio: float, rate: float) -> dict[str, Any]:
    """Return what both rules take for a step of a network, by turns."""
    seconds = 2 * (world.size - 1) / world.size * TOTAL * 8 / rate / ratio
    group = world.split(0)
    alone = exchange_alone(group, None)
    rules: dict[str, BaseRule] = {"BSP": BSP(SCHEDULE), "Sharded": Sharded(SCHEDULE)}
    trainers = {key: trainer_of(Network(NETWORKS[name], seconds), group, rule) for key, rule in rules.items()}
    took: dict[str, list[float]] = {key: [] for key in rules}
    for _ in range(ROUNDS):
        for key, trainer in trainers.items():
            step = trainer_step(trainer)
            world.barrier()
            step()  # from here on each step finds what the last one has left to it
            began = time.perf_counter()
            step()
            took[key].append(max(world.all_gather_object(time.perf_counter() - began)))
            trainer.wait()
    chosen = {key: trainer.reducer.programs.tuning.setting for key, trainer in trainers.items()}
    settings = {key: [setting.overlap, setting.bucket_bytes, setting.end_ratio] for key, setting in chosen.items()}
    medians = {key: statistics.median(each) for key, each in took.items()}
    group.free()
    return {
        **{"network": name, "ratio": ratio, "hosts": world.size, "computing_s": seconds, "exchange_alone_s": alone},
        **{"setting": settings, "seconds": took, "step_s": medians, "bound_s": max(seconds, alone)},
    }


def main(output: str, rate: str, *names: str) -> None:
    """Measure networks at each ratio."""
    world = unisono.init()
    path, rows = Path(output), list[dict[str, Any]]()
    if path.exists():
        rows = json.loads(path.read_text())
    for name in names or NETWORKS:
        for ratio in RATIOS:
            result = measure(world, name, ratio, float(rate))
            rows = [row for row in rows if (row["network"], row["ratio"]) != (name, ratio)] + [result]
            if world.rank == 0:
                step, bound = result["step_s"], result["bound_s"]
                each = "  ".join(f"{key} {seconds:.3f} s" for key, seconds in step.items())
                print(f"{name} {ratio:g}: {each}  bound {bound:.3f} s  {result['setting']}", flush=True)
                path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
