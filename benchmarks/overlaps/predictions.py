"""How true the predicted step is: for each network and ratio the setting that `auto` finds, predicted and measured.

Started on the ranks by run.py:  predictions.py OUTPUT RATE_BITS NETWORK
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from layers import NETWORKS
from steps import RATIOS, TOTAL, Network, ours, search, trainer_step

import unisono
from unisono.step.costs import Cost
from unisono.world import World

TIMED = 7
"""Steps that are timed, one after another: each finds what the one before has left to it."""


def measure(world: World, name: str, ratio: float, beta: float) -> dict[str, Any]:
    """Find the setting, then time steps with it; of the rank that took longest."""
    seconds = Cost(0.0, 2 * (world.size - 1) / world.size * beta).seconds(TOTAL) / ratio
    group = world.split(0)
    trainer = ours(Network(NETWORKS[name], seconds), group, "auto", None, None)
    said: list[str] = []
    trainer.reducer.programs.log_with(said.append)
    search(trainer)
    chosen = trainer.reducer.programs.tuning.chosen
    assert chosen is not None, "the search has ended"
    step, took = trainer_step(trainer), list[float]()
    step()
    for _ in range(TIMED):
        start = time.perf_counter()
        step()
        took.append(max(world.all_gather_object(time.perf_counter() - start)))
    trainer.wait()
    row = {
        "network": name,
        "ratio": ratio,
        "ranks": world.size,
        "setting": list(trainer.reducer.programs.tuning.setting[:2]),
    }
    row |= {"predicted_s": chosen.prediction.step, "seconds": took, "step_s": statistics.median(took), "said": said}
    group.free()
    return row


def main(output: str, rate: str, name: str) -> None:
    """All ratios of a network; what the file has of other networks and numbers of ranks stays there."""
    world = unisono.init()
    path = Path(output)
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [row for row in rows if (row["network"], row["ranks"]) != (name, world.size)]
    for ratio in RATIOS:
        rows.append(measure(world, name, ratio, 8 / float(rate)))
        if world.rank == 0:
            row = rows[-1]
            off = row["predicted_s"] / row["step_s"] - 1
            print(f"{name} x{ratio}, {world.size} hosts: {row['step_s']:.3f} s, predicted {off:+.1%}", flush=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")
    world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
