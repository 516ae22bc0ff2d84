"""Time and memory to simulate one allreduce on 40,960 ranks, 160 supernodes of 256 nodes (swCaffe's machine).

python benchmarks/simulation/run.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from unisono.network import shaped, simulate
from unisono.placement import regular
from unisono.schedules import find

SCHEDULES = ("halving", "halving/round-robin")


def simulate_one(name: str) -> None:
    """In a process of its own: simulate, and print seconds, megabytes and what came of it."""
    start = time.perf_counter()
    placement = regular(160, 256, 1)
    done = simulate(find(name, placement).allreduce, placement, shaped(10e9, 256, 4), 100_000_000, 1 << 30)
    took = time.perf_counter() - start
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"seconds": done.seconds, "messages": done.messages, "steps": done.steps, "exact": done.exact}
    print(json.dumps({"schedule": name, "took_s": took, "memory_mb": megabytes, **result}))


def main() -> None:
    """Simulate each schedule and write results.json."""
    if sys.argv[1:]:
        simulate_one(sys.argv[1])
        return
    rows = []
    for name in SCHEDULES:
        done = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(f"{name}: {rows[-1]['took_s']:.1f} s, {rows[-1]['memory_mb']:.0f} MB, {rows[-1]['messages']} messages")
    (Path(__file__).parent / "results.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
