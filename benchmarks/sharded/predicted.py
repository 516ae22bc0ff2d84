"""Steps of BSP and Sharded as predicted, in equal buckets and in those that the search chooses; no ranks are needed.

python benchmarks/sharded/predicted.py

The networks, ratios and link of `steps.py`. The costs are those of four idle hosts at 100 Mbit/s: a byte as in an
exchange of all gradients alone, and the start of a collective from those of 1 MiB, alone.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import BUCKET_SIZES, PredictionInputs, Setting, candidates, predicted
from unisono.rules import BSP, BaseRule, Sharded
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Layout

sys.path.insert(0, str(Path(__file__).parents[1] / "overlaps"))
from layers import NETWORKS, Layer

HOSTS = 4
TOTAL = 8_000_000
RATIOS = (0.5, 1.0, 2.0)
COMPUTING = 0.96
"""Seconds of computing at ratio 1, as long as the link needs for the bytes alone."""

ALONE = 1.0157
"""Seconds of an exchange of all gradients alone (`steps.json`, ResNet-50 at ratio 1)."""

LATENCIES: dict[BaseRule, float] = {BSP(): 1e-3, Sharded(): 3.3e-3}
"""Seconds of all collectives of a bucket besides those of its bytes."""


def network(layers: list[Layer], seconds: float) -> tuple[Computing, list[int]]:
    """Return the times of a network's layers, a third of them forward, and the bytes of each."""
    work, weights = (
        sum(each) for each in zip(*((layer.multiplications, layer.parameters) for layer in layers), strict=True)
    )
    took = [seconds * layer.multiplications / work for layer in layers]
    needed = [0.0, *accumulate(layer_seconds / 3 for layer_seconds in took[:-1])]
    ready = [seconds / 3 + each for each in accumulate(layer_seconds * 2 / 3 for layer_seconds in reversed(took))]
    sizes = [4 * round(layer.parameters * TOTAL / 4 / weights) for layer in layers]
    return Computing(tuple(needed), tuple(reversed(ready)), seconds), sizes


def main() -> None:
    """Print a row of a table for each network and ratio."""
    print("| network | ratio | bound | BSP, equal | BSP, chosen | Sharded, equal | Sharded, chosen |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, layers in NETWORKS.items():
        for ratio in RATIOS:
            computing, sizes = network(layers, COMPUTING / ratio)
            cells = [name, f"{ratio:g}", f"{max(computing.whole, ALONE):.3f}"]
            for rule, latency in LATENCIES.items():
                costs = Costs(Layout(HOSTS, len(sizes), ()), computing, Cost(latency, ALONE / TOTAL))
                inputs = PredictionInputs(rule, costs, partial(buckets_of, sizes), HOSTS)
                equal = min(predicted(inputs, Setting("chain", size)).prediction.step for size in BUCKET_SIZES)
                best = candidates(inputs._replace(rule=replace(rule, overlap="chain")))[0]
                setting = f"{best.setting.bucket_bytes / (1 << 20):g} MiB / {best.setting.end_ratio}"
                cells += [f"{equal:.3f}", f"{best.prediction.step:.3f} ({setting})"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
