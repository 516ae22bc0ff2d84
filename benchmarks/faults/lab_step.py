"""A rank of the lab: times steps whose computing is slept, for the layers of ResNet-50 where the link needs as long.

Started on the hosts by cost.py:  lab_step.py OUTPUT RATE_BITS STEPS. It takes `steps` and `layers` from PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from layers import NETWORKS
from steps import TOTAL, Network, ours, trainer_step

import unisono
from unisono.step.costs import Cost


def main(output: str, rate: str, steps: str) -> None:
    """Write the seconds of each step, of the rank that took longest."""
    world = unisono.init()
    seconds = Cost(0.0, 2 * (world.size - 1) / world.size * 8 / float(rate)).seconds(TOTAL)
    trainer = ours(Network(NETWORKS["ResNet-50"], seconds), world, "chain", None, 1 << 20)
    step, took = trainer_step(trainer), list[float]()
    for number in range(3 + int(steps)):  # the first find what each takes
        world.barrier()
        begun = time.perf_counter()
        step()
        trainer.wait()
        if number >= 3:
            took.append(max(world.gather(time.perf_counter() - begun)))
    if world.rank == 0:
        Path(output).write_text(json.dumps(took))
    world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
