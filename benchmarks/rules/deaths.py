"""Deaths of workers under EASGD: a random worker is killed at a random moment; the others go on, and the run replays.

    python benchmarks/rules/deaths.py OUT.json                       with the mpiexec beside this Python
    python benchmarks/rules/deaths.py OUT.json --runs 5 --signal STOP

Under Open MPI all runs should end with exit code 0, with the accuracy of a run in which nobody dies, and replay bit for
bit. Under MPICH the launcher ends all ranks: the run should end soon, name the rank, and resume from the centre.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from unisono.launch import find_mpiexec, is_open_mpi
from unisono.startup import rank_of

WORKERS = 3
EPOCHS = 8
RECIPE = ("digits", f"--ranks={WORKERS + 1}", "--set=rule.name=easgd", f"--set=training.epochs={EPOCHS}")
LIMIT_SECONDS = 120.0
"""Seconds after which a run counts as hanging."""


def command(*arguments: str) -> list[str]:
    """Return the command of a training run."""
    return [sys.executable, "-m", "unisono", "train", *arguments]


def worker_process(launcher: int, worker: int) -> int | None:
    """Return the process of a rank among the descendants of a process; None where there is none."""
    waiting = [launcher]
    while waiting:
        parent = waiting.pop()
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            try:
                if rank_of(Path(f"/proc/{child}/environ").read_bytes()) == worker:
                    return child
            except OSError:
                continue
            waiting.append(child)
    return None


def exchanges(run: Path) -> int:
    """Return the number of exchanges in the log so far."""
    log = run / "events" / "server-0.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def end_of(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code of a process; None where it hangs, which ends it."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def one_run(index: int, how: signal.Signals | None, folder: Path, expected: int) -> dict[str, Any]:
    """Run once, with a signal to a random worker at a random exchange, and replay the run. Return what happened."""
    chance = random.Random(index)
    run, log = folder / f"run-{index}", folder / f"run-{index}.log"
    worker, exchange = chance.randrange(WORKERS), chance.randrange(1, int(0.9 * expected))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(*RECIPE, f"--set=training.seed={index}", f"--run={run}"),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        began = time.monotonic()
        while how is not None and exchanges(run) < exchange and process.poll() is None:
            time.sleep(0.005)
        sent = exchanges(run)
        if how is not None and (rank := worker_process(process.pid, worker)) is not None:
            os.kill(rank, how)
        killed = time.monotonic()
        code = end_of(process, LIMIT_SECONDS)
    ended = time.monotonic()
    text = log.read_text(errors="replace")
    result: dict[str, Any] = {
        **{"run": index, "worker": worker if how else None, "at_exchange": sent, "exchanges": exchanges(run)},
        **{"exit_code": code, "seconds_before": killed - began, "seconds_after": ended - killed},
        "says": [line for line in text.splitlines() if "the others go on" in line or "ended unexpectedly" in line],
    }
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    result["accuracy"] = json.loads(lines[-1])["test_accuracy"] if lines else None
    result["epochs"] = len(lines)
    if code == 0:
        again = subprocess.run(
            command(f"--replay={run}", f"--run={folder / f'replay-{index}'}"),
            capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
        result["replay"] = "bit for bit" in again.stdout and again.returncode == 0
        if not result["replay"]:
            result["replay_says"] = (again.stdout + again.stderr)[-600:]
    elif lines:
        again = subprocess.run(
            command(f"--resume={run}"), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
        accuracy = re.findall(r"test accuracy ([\d.]+)%", again.stdout)
        result["resumed"] = {"exit_code": again.returncode, "accuracy": float(accuracy[-1]) / 100 if accuracy else None}
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    """Run all, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--signal", default="KILL", choices=("KILL", "STOP", "none"))
    options = parser.parse_args()
    mpiexec = find_mpiexec()
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]
    how = None if options.signal == "none" else signal.Signals[f"SIG{options.signal}"]
    with tempfile.TemporaryDirectory() as folder:
        expected = EPOCHS * 1437 // (64 // WORKERS)
        numbers = range(options.first, options.first + options.runs)
        results = [one_run(index, how, Path(folder), expected) for index in numbers]
    setup = {
        "mpiexec": version,
        "survives": is_open_mpi(mpiexec),
        "recipe": RECIPE,
        "signal": options.signal,
    }
    options.output.write_text(json.dumps({**setup, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
