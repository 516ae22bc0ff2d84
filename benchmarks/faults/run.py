"""Faults of ranks and programs, many times at random moments; see README.md.

python benchmarks/faults/run.py ranks [--runs 25] [--startup 10]
python benchmarks/faults/run.py programs [--resident 2000] [--across 200] [--each 25]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

import programs
import ranks
from launches import own_shared_folders

HERE = Path(__file__).parent


def main() -> None:
    """Run one kind, print its table, write it and what failed; exit code 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["ranks", "programs"])
    parser.add_argument("--runs", type=int, default=25, help="of each fault while the run trains")
    parser.add_argument("--startup", type=int, default=10, help="of any fault before the run has begun")
    parser.add_argument("--only", default="", help="faults whose name has this, as 'SIGSTOP to a rank'")
    parser.add_argument("--resident", type=int, default=2000, help="programs in ranks of one node")
    parser.add_argument("--across", type=int, default=200, help="programs in ranks as if across nodes")
    parser.add_argument("--each", type=int, default=25, help="launches with each of the ends")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds after a time-out for all to end or go on")
    parser.add_argument("--seed", type=int, default=0, help="where the seeds begin")
    given = parser.parse_args()
    own_shared_folders()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, and launches inherit that
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # ends the launches as well
    if given.kind == "ranks":
        table, outcomes = ranks.measure(given.runs, given.startup, given.only, given.seed)
    else:
        table, outcomes = programs.measure(given.resident, given.across, given.each, given.seed, given.grace)
    failed = [outcome for outcome in outcomes if outcome["failures"]]
    (HERE / f"{given.kind}.md").write_text(table + "\n")
    (HERE / f"{given.kind}.json").write_text(json.dumps({"outcomes": len(outcomes), "failed": failed}, indent=1) + "\n")
    print(f"\n{table}\n\n{len(failed)} of {len(outcomes)} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
