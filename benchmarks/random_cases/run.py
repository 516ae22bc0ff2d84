"""Random cases on 1 to 9 ranks, and mismatches: tests/mpi/collectives/test_random_cases.py, test_random_candidates.py.

python benchmarks/random_cases/run.py [placements] [candidates] [RANKS ...]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.launch import find_mpiexec, launch_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

PARTS = {
    "placements": ("test_random_cases.py", range(1, 10), {"UNISONO_CASES": 560}, 4),
    "candidates": ("test_random_candidates.py", range(2, 9), {"UNISONO_CASES": 715, "UNISONO_MISMATCHES": 43}, 2),
}
"""File of tests, numbers of ranks, how many cases on each number of ranks, and the number of tests."""


def files() -> set[str]:
    """What MPI and this project may have made in /dev/shm and /tmp."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return names | {path.name for path in Path("/tmp").glob("hydra_*")}


def left_behind(before: set[str]) -> list[str]:
    """Return the new files; those of other jobs vanish meanwhile, or are mapped by a process."""
    deadline = time.monotonic() + 60
    while (new := files() - before) and time.monotonic() < deadline:
        mapped = b""
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):  # the process has ended
                mapped += maps.read_bytes()
        if not (new := {name for name in new if name.encode() not in mapped}):
            break
        time.sleep(1)
    return sorted(new)


def run(part: str, ranks: int) -> dict[str, Any]:
    """Run a part's cases on so many ranks, with trials of their own; end with the output if one fails."""
    file, _, counts, tests = PARTS[part]
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, "-m", "pytest", "-q", "-x"]
    command += ["-p", "no:cacheprovider", str(ROOT / "tests/mpi/collectives" / file)]
    counted = {name: str(count) for name, count in counts.items()}
    before, start = files(), time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        environment = {**launch_environment(os.environ, terminal=False), **counted, "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600, check=False)
    passed = done.returncode == 0 and re.search(rf"^{tests} passed", done.stdout, re.MULTILINE) is not None
    if not passed:
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
        sys.exit(1)
    named = {name.removeprefix("UNISONO_").lower(): count for name, count in counts.items()}
    seconds = round(time.monotonic() - start)
    return {"part": part, "ranks": ranks, **named, "seconds": seconds, "left_behind": left_behind(before)}


def main() -> None:
    """Run the parts that were asked for, on the numbers of ranks that were asked for, and update results.json."""
    asked = sys.argv[1:]
    ranks_asked = {int(word) for word in asked if word.isdigit()}
    path = HERE / "results.json"
    kept = {(row["part"], row["ranks"]): row for row in json.loads(path.read_text())} if path.exists() else {}
    for part in [part for part in PARTS if part in asked] or PARTS:
        for ranks in PARTS[part][1]:
            if not ranks_asked or ranks in ranks_asked:
                kept[part, ranks] = run(part, ranks)
                print(kept[part, ranks], flush=True)
                path.write_text(json.dumps([kept[key] for key in sorted(kept)], indent=1) + "\n")
    results = kept.values()
    left = sorted({name for row in results for name in row["left_behind"]})
    cases, mismatches = (sum(row.get(kind, 0) for row in results) for kind in ("cases", "mismatches"))
    print(f"{cases} cases right, {mismatches} mismatches named; left behind: {left or 'nothing'}")


if __name__ == "__main__":
    main()
