"""5,000 random cases on 1 to 9 ranks, against a float64 sum; see tests/mpi/collectives/test_random_cases.py.

python benchmarks/random_cases/run.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from unisono.launch import find_mpiexec, launch_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = 560
"""On each number of ranks."""


def left_behind() -> set[str]:
    """What MPI and this project may have left in /dev/shm and /tmp."""
    found = {path.name for path in Path("/dev/shm").iterdir()}
    return found | {path.name for path in Path("/tmp").glob("hydra_*")}


def main() -> None:
    """Run the cases and write results.json."""
    before = left_behind()
    results = []
    for ranks in range(1, 10):
        command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, "-m", "pytest", "-q", "-x"]
        command += ["-p", "no:cacheprovider", str(ROOT / "tests/mpi/collectives/test_random_cases.py")]
        environment = {**launch_environment(os.environ, terminal=False), "UNISONO_CASES": str(CASES)}
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
        passed = done.returncode == 0 and re.search(r"^4 passed", done.stdout, re.MULTILINE) is not None
        results.append({"ranks": ranks, "cases": CASES, "passed": passed, "seconds": round(time.monotonic() - start)})
        print(results[-1], flush=True)
        if not passed:
            print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
            sys.exit(1)
    left = sorted(left_behind() - before)
    (HERE / "results.json").write_text(json.dumps({"runs": results, "left_behind": left}, indent=1) + "\n")
    print(f"{sum(run['cases'] for run in results)} cases passed; left behind: {left or 'nothing'}")


if __name__ == "__main__":
    main()
