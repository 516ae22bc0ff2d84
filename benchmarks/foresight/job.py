"""Job whose wall time is predicted before it is started, and which then trains. Started by jobs.py.

    predict    machine file of a probe of 2 hosts ─▶ steps, parts of the wall time ─▶ JOB.json
    train      on the ranks of the lab: as many steps, one checkpoint

python job.py predict|train SEED NUMBER FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from ranks import TRACED, rule_named, slept_machine, slept_run, small_layers
from settings import JobDraw, draw_jobs

import unisono
from unisono.plan.machines import MachineFacts, find_machine
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_plan import predict_run
from unisono.plan.run_report import job_seconds, slurm_time


def predict(job: JobDraw, machine: MachineFacts, path: Path) -> None:
    """Write the steps of a job and its predicted wall time, by part, as `unisono plan` predicts it."""
    run, cluster = job.run, job.cluster
    layers = small_layers(run, cluster)
    machine = slept_machine(machine, layers, cluster, 0.0)
    rule, samples = rule_named(run.rule, run.wire), run.batch * cluster.ranks
    planned = PlannedRun(machine, layers, TRACED, rule, samples, cluster.ranks)
    row = predict_run(planned)[0]
    steps = round(60 * job.minutes / row.step)
    seconds = job_seconds(replace(planned, epoch_samples=steps * samples), row)
    asked = slurm_time(seconds.total)
    hours, minutes, _ = (int(word) for word in asked.partition("-")[2].split(":"))
    limit = 3600 * hours + 60 * minutes
    facts = {"steps": steps, "step": row.step, "parts": seconds._asdict(), "time": asked, "limit": limit}
    path.write_text(json.dumps(facts, indent=1) + "\n")


def train(job: JobDraw, machine: MachineFacts, steps: int, checkpoint: Path) -> None:
    """Make the steps of a job, and a checkpoint behind them."""
    world = unisono.init()
    trainer, network = slept_run(world, machine, job.cluster, job.run)
    ends = [time.monotonic()]
    for _ in range(steps):
        trainer.step(torch.ones(1, 1), torch.zeros(1))
        ends.append(time.monotonic())
    trainer.wait()
    if world.rank == 0:
        step = median(end - begin for begin, end in pairwise(ends))
        measured = {"measured_step": step, "all_steps": ends[-1] - ends[0]}
        checkpoint.with_suffix(".steps").write_text(json.dumps(measured))
    state = network.state_dict(), trainer.optimizer.state_dict()
    world.call_on_root(lambda: torch.save(state, checkpoint))


def main(what: str, seed: str, index: str, folder: str) -> None:
    """Predict a job, or train."""
    home, job = Path(folder), draw_jobs(int(seed))[int(index)]
    machine, path = find_machine(str(home / f"hosts-{job.hosts}.toml")), home / f"job-{index}.json"
    if what == "predict":
        predict(job, machine, path)
    else:
        train(job, machine, json.loads(path.read_text())["steps"], home / f"job-{index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
