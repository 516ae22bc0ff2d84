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


def measure(number: int, seed: str, home: Path) -> None:
    """Run a job that was predicted, unless it was run; add the seconds of its command."""
    path = home / f"job-{number}.json"
    facts = json.loads(path.read_text())
    if "seconds" in facts:
        return
    begin = time.monotonic()
    in_lab(
        draw_jobs(int(seed))[number].cluster,
        sys.executable,
        str(HERE / "job.py"),
        "train",
        seed,
        str(number),
        str(home),
    )
    facts["seconds"] = time.monotonic() - begin
    facts |= json.loads(path.with_suffix(".steps").read_text())
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"job {number}: {facts['seconds']:.0f} s of {facts['limit']} s", flush=True)


def write_table(seed: str, home: Path) -> None:
    """Write `jobs.md`: each job, and how many ended in time and used their time."""
    jobs = draw_jobs(int(seed))
    found = [json.loads((home / f"job-{number}.json").read_text()) for number in range(len(jobs))]
    within = sum(one["seconds"] <= one["limit"] for one in found)
    used = sum(one["seconds"] >= USED * one["limit"] for one in found)
    lines = [
        "# Wall time of jobs and the time asked for",
        "",
        f"{within} of {len(found)} ended in time; {used} used at least {USED:.0%} of it.",
        "",
        "| hosts | network | samples a rank | rule | wire | steps | `--time` | seconds | share |",
        "| ---: | --- | ---: | --- | --- | ---: | --- | ---: | ---: |",
    ]
    for job, one in zip(jobs, found, strict=True):
        words = [job.hosts, job.run.network, job.run.batch, job.run.rule, job.run.wire or "float32", one["steps"]]
        share = one["seconds"] / one["limit"]
        lines.append(f"| {' | '.join(map(str, words))} | {one['time']} | {one['seconds']:.0f} | {share:.0%} |")
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
    for number in range(len(jobs)):
        if not (home / f"job-{number}.json").exists():
            command = [sys.executable, str(HERE / "job.py"), "predict", seed, str(number), str(home)]
            subprocess.run(command, check=True)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(partial(measure, seed=seed, home=home), range(len(jobs))))
    write_table(seed, home)


if __name__ == "__main__":
    main(*sys.argv[1:])
