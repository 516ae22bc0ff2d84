"""Runs `unisono train digits` alone and beside busy loops, by turns: setting, prediction, and what was measured.

    alone-1   busy-1   alone-2   busy-2   ...      each `unisono train digits` in a folder of its own
              └ LOOPS processes that compute all the time

python benchmarks/foresight/busy.py RUNS LOOPS FOLDER

Settings and times are those of the run's folder (`prediction.json`, `measurement.json`, `metrics.jsonl`); only the
first line and the first epoch are timed here. Runs that a folder has already stay.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

POLL = 0.02
"""Seconds between two looks for the first epoch's metrics."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep `count` processes computing meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def train(folder: Path) -> tuple[float, float]:
    """Run the recipe. Return the seconds until its first line and until its first epoch was written."""
    command = [str(Path(sys.executable).with_name("unisono")), "train", "digits", "--run", str(folder)]
    command += ["--ledger", str(folder.parent / "ledger.jsonl")]
    began, first, epoch, lines = time.monotonic(), 0.0, 0.0, b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(run.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(None if epoch else POLL):
                    read = os.read(run.stdout.fileno(), 1 << 16)
                    first, lines = first or time.monotonic() - began, lines + read
                    if not read:
                        break
                metrics = folder / "metrics.jsonl"
                if not epoch and metrics.exists() and metrics.stat().st_size:
                    epoch = time.monotonic() - began
    folder.with_suffix(".txt").write_bytes(lines)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {run.returncode}:\n{lines.decode()}")
    return first, epoch


def facts_of(folder: Path, first: float, epoch: float) -> dict[str, Any]:
    """Return the figures of a run that has ended."""
    sealed, measured = (json.loads((folder / f"{name}.json").read_text()) for name in ("prediction", "measurement"))
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step, program = measured["step"]["median"], sealed["program"]
    return {
        "samples_per_second": median(record["samples_per_second"] for record in epochs),
        "overlap": program["overlap"],
        "bucket_bytes": program["bucket_bytes"],
        "buckets": program["buckets"],
        "predicted": sealed["step"],
        "low": sealed["low"],
        "high": sealed["high"],
        "measured": step,
        "covered": sealed["low"] <= step <= sealed["high"],
        "doubt": sealed["doubt"],
        "taken": [sum(part["processor"][key] for key in ("others", "stolen")) for part in (sealed, measured)],
        "first_line": first,
        "first_epoch": epoch,
    }


def table(runs: dict[str, dict[str, Any]], loops: int) -> str:
    """Return the runs as a table, with the medians of those alone and of those beside loops below."""
    heads = ("samples/s", "setting", "predicted", "interval", "measured", "error", "covered", "taken by others")
    lines = [
        f"| run | {' | '.join(heads)} | first line | first epoch |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for name, run in runs.items():
        cells = [
            f"{run['samples_per_second']:,.0f}",
            f"{run['overlap']}, {run['buckets']} of {run['bucket_bytes'] / (1 << 20):g} MiB",
            f"{run['predicted'] * 1e3:.1f} ms",
            f"{run['low'] * 1e3:.1f} - {run['high'] * 1e3:.1f} ms",
            f"{run['measured'] * 1e3:.1f} ms",
            f"{run['measured'] / run['predicted'] - 1:+.0%}",
            "yes" if run["covered"] else "no",
            f"{run['taken'][0]:.0%}, then {run['taken'][1]:.0%}",
            f"{run['first_line']:.1f} s",
            f"{run['first_epoch']:.1f} s",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    for kind, label in (("alone", "alone"), ("busy", f"beside {loops} busy loops")):
        chosen = [run for name, run in runs.items() if name.startswith(kind)]
        rate, covered = median(run["samples_per_second"] for run in chosen), sum(run["covered"] for run in chosen)
        off = median(abs(run["measured"] / run["predicted"] - 1) for run in chosen)
        starts = [median(run[key] for run in chosen) for key in ("first_line", "first_epoch")]
        lines.append(
            f"{label}: {rate:,.0f} samples/s, error {off:.0%} in the median, {covered} of {len(chosen)} covered; "
            f"first line after {starts[0]:.1f} s, first epoch after {starts[1]:.1f} s"
        )
    return "\n".join(lines) + "\n"


def main(runs: str, loops: str, folder: str) -> None:
    """Make the runs that the folder lacks, and write their table."""
    home = Path(folder).absolute()
    home.mkdir(parents=True, exist_ok=True)
    path = home / "busy.json"
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for index in range(1, int(runs) + 1):
        for kind, count in (("alone", 0), ("busy", int(loops))):
            if (name := f"{kind}-{index}") not in results:
                shutil.rmtree(home / name, ignore_errors=True)  # of a run that was stopped
                with busy_loops(count):
                    first, epoch = train(home / name)
                results[name] = facts_of(home / name, first, epoch)
                path.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{name}: {results[name]['samples_per_second']:,.0f} samples/s", flush=True)
    lines = table(results, int(loops))
    (home / "busy.md").write_text(lines)
    print(lines, end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
