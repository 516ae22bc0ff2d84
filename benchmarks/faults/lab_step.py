"""A rank of the lab: times steps whose computing is slept, of which the link needs `RATIO` times as long.

Started on the hosts by cost.py:  lab_step.py OUTPUT RATE_BITS STEPS NETWORK RATIO. It takes `steps` and `layers` from
PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from layers import NETWORKS
from steps import TOTAL, Network, ours, trainer_step

import unisono


def main(output: str, rate: str, steps: str, network: str, ratio: str) -> None:
    """Write the seconds of each step, of the rank that took longest."""
    world = unisono.init()
    link = 2 * (world.size - 1) / world.size * 8 * TOTAL / float(rate)
    trainer = ours(Network(NETWORKS[network], link / float(ratio)), world, "chain", None, 1 << 20)
    step, took = trainer_step(trainer), list[float]()
    for index in range(3 + int(steps)):  # the first find what each takes
        world.barrier()
        begun = time.perf_counter()
        step()
        trainer.wait()
        if index >= 3:
            took.append(max(world.comm.allgather(time.perf_counter() - begun)))
    if world.rank == 0:
        Path(output).write_text(json.dumps(took))
    world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
