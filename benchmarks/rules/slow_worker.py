"""Steps a second of the fast workers beside one that is twice as slow: EASGD and BSP, on one machine.

mpiexec -n 5 python benchmarks/rules/slow_worker.py OUT.json      rank 4 is EASGD's server; BSP has ranks 0 to 3
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from slept import ElasticRun, Network, batch, spread, trainer_of

import unisono
from unisono.rules import EASGD

WORKERS = 4
COMPUTING = 0.1
"""Seconds of computing of a step; the slow worker's are twice as many."""

SIZES = (10_000,) * 10
"""Weights of each layer, of 4 bytes."""

SECONDS = 8.0
"""Seconds for which workers train in a measurement of EASGD."""

STEPS = {"equal": 60, "slow": 30}
"""Steps of a measurement of BSP."""

ROUNDS = 5


def main(output: str) -> None:
    """Measure both rules in both settings by turns."""
    world = unisono.init()
    exchange = unisono.Exchange(bucket_bytes=1 << 20)
    easgd = ElasticRun(world, EASGD(exchange, "chain", alpha=0.5, period=1), Network(SIZES, COMPUTING))
    trains = world.rank < WORKERS
    group = world.split(0 if trains else 1)
    bsp = trainer_of(Network(SIZES, COMPUTING), group, unisono.BSP(exchange, "chain"))

    def run_bsp(steps: int) -> float:
        for _ in range(steps if trains else 0):
            bsp.step(*batch())
        bsp.wait()
        return time.perf_counter()

    run_bsp(20)
    easgd.run(lambda done: done < 20)
    rates: dict[str, dict[str, list[float]]] = {rule: {"equal": [], "slow": []} for rule in ("EASGD", "BSP")}
    slow_rates = list[float]()
    for _ in range(ROUNDS):
        for setting in ("equal", "slow"):
            seconds = COMPUTING * (2 if setting == "slow" and world.rank == 0 else 1)
            easgd.network.seconds = bsp.model.seconds = seconds
            world.barrier()
            began = time.perf_counter()
            ends = easgd.run(lambda _, until=began + SECONDS: time.perf_counter() < until)
            each = world.all_gather_object(len(ends) / (ends[-1] - began) if ends else 0.0)
            rates["EASGD"][setting].append(statistics.mean(each[1:WORKERS]))
            if setting == "slow":
                slow_rates.append(each[0])
            world.barrier()
            began = time.perf_counter()
            each = world.all_gather_object(STEPS[setting] / (run_bsp(STEPS[setting]) - began))
            rates["BSP"][setting].append(statistics.mean(each[1:WORKERS]))
    if world.rank == 0:
        results = {
            **{"workers": WORKERS, "computing_s": COMPUTING, "bytes": 4 * sum(SIZES), "rounds": ROUNDS},
            **{"steps_a_second": rates, "of_the_slow_worker": slow_rates},
        }
        results["slow_over_equal"] = {
            rule: spread([slow / equal for slow, equal in zip(of_rule["slow"], of_rule["equal"], strict=True)])
            for rule, of_rule in rates.items()
        }
        print(json.dumps(results["slow_over_equal"]), flush=True)
        Path(output).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
