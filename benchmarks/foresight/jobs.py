"""Runs jobs in the lab and compares their wall time with what `unisono plan` says to ask a scheduler for.

Three jobs run at a time, each in a lab of its own. A job's time is that of its command, from start to end.

python benchmarks/foresight/jobs.py SEED FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from settings import draw_jobs

from run import HERE, PROBE_SECONDS, in_lab

AT_A_TIME = 3
USED = 0.7
"""Share of the time asked for that a job should use."""


def measure(index: int, seed: str, home: Path) -> None:
    """Run a job that was predicted, unless it was run; add the seconds of its command."""
    path = home / f"job-{index}.json"
    facts = json.loads(path.read_text())
    if "seconds" in facts:
        return
    begin = time.monotonic()
    in_lab(
        draw_jobs(int(seed))[index].cluster,
        sys.executable,
        str(HERE / "job.py"),
        "train",
        seed,
        str(index),
        str(home),
    )
    facts["seconds"] = time.monotonic() - begin
    facts |= json.loads(path.with_suffix(".steps").read_text())
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"job {index}: {facts['seconds']:.0f} s of {facts['limit']} s", flush=True)


def write_table(seed: str, home: Path) -> None:
    """Write `jobs.md`: each job, and how many ended in time and used their time."""
    jobs = draw_jobs(int(seed))
    results = [json.loads((home / f"job-{index}.json").read_text()) for index in range(len(jobs))]
    within = sum(result["seconds"] <= result["limit"] for result in results)
    used = sum(result["seconds"] >= USED * result["limit"] for result in results)
    lines = [
        "# Wall time of jobs and the time asked for",
        "",
        f"{within} of {len(results)} ended in time; {used} used at least {USED:.0%} of it.",
        "",
        "| hosts | network | samples a rank | rule | wire | steps | `--time` | seconds | share |",
        "| ---: | --- | ---: | --- | --- | ---: | --- | ---: | ---: |",
    ]
    for job, result in zip(jobs, results, strict=True):
        cells = [job.hosts, job.run.network, job.run.batch, job.run.rule, job.run.wire or "float32", result["steps"]]
        share = result["seconds"] / result["limit"]
        lines.append(f"| {' | '.join(map(str, cells))} | {result['time']} | {result['seconds']:.0f} | {share:.0%} |")
    (home / "jobs.md").write_text("\n".join(lines) + "\n")


def main(seed: str, folder: str) -> None:
    """Probe, predict all jobs, then run them; what a folder has already stays."""
    home, jobs = Path(folder).absolute(), draw_jobs(int(seed))
    home.mkdir(parents=True, exist_ok=True)
    for job in {job.hosts: job for job in jobs}.values():
        machine = home / f"hosts-{job.hosts}.toml"
        if not machine.exists():
            unisono = str(Path(sys.executable).with_name("unisono"))
            in_lab(job.cluster.probed, unisono, "probe", str(machine), f"--seconds={PROBE_SECONDS}")
    for index in range(len(jobs)):
        if not (home / f"job-{index}.json").exists():
            command = [sys.executable, str(HERE / "job.py"), "predict", seed, str(index), str(home)]
            subprocess.run(command, check=True)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(partial(measure, seed=seed, home=home), range(len(jobs))))
    write_table(seed, home)


if __name__ == "__main__":
    main(*sys.argv[1:])
