"""Launches of random programs with planted errors; what every rank says of each is judged here."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launches import Launch, tail
from program import ERRORS, MOVING, REDUCING, random_program

from unisono.launch import find_mpiexec, launch_environment

PLAYER = Path(__file__).parent / "player.py"
RANKS = (2, 3, 4)
BATCH = 40
"""Programs of a launch: worlds that were broken are not given back."""

TIMEOUT, TIMEOUT_OF_ENDS = 1.0, 15.0
"""Seconds that a rank waits for others: in programs one after another, and where one ends early."""

START = 60.0
"""Seconds that a launch may take to start."""

ENDS = ("end", "exception", "stop", "death")
CALLS = re.compile("|".join(("barrier", *REDUCING, *MOVING, "reduce_scatter", "all_gather")))
A_RANK = re.compile(r"\branks? \d")


@dataclass
class Outcome:
    """What came of a program. `kind` says it in one word, `failures` what is wrong with it."""

    where: str
    error: str
    ranks: int
    seed: int
    kind: str = ""
    named: bool = True
    failures: list[str] = field(default_factory=list)


def launch(ranks: int, folder: Path, *arguments: object, timeout: float) -> Launch:
    """The player on so many ranks."""
    folder.mkdir()
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, str(PLAYER), str(folder), *map(str, arguments)]
    seconds = {"UNISONO_TIMEOUT": f"{timeout:g}", "FAULTS_TIMEOUT": f"{timeout:g}", "OMP_NUM_THREADS": "1"}
    return Launch(command, folder, {**launch_environment(os.environ, terminal=False), **seconds})


def read(folder: Path, ranks: int) -> list[dict[int, dict[str, Any]]]:
    """For each rank the last line of each program's seed."""
    by_rank: list[dict[int, dict[str, Any]]] = []
    for rank in range(ranks):
        path, said = folder / f"{rank}.jsonl", {}
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            if line.endswith("\n"):
                said[json.loads(line)["seed"]] = json.loads(line)
        by_rank.append(said)
    return by_rank


def judge(outcome: Outcome, said: Sequence[dict[str, Any]]) -> None:
    """Hold what the ranks say of a program, that all came to the end of, to the promise."""
    program = random_program(outcome.seed, outcome.ranks)
    planted = said[program.rank]["call"] >= program.place
    kinds = {line["outcome"] for line in said}
    outcome.kind = next(kind for kind in ("wrong", "crashed", "raised", "right") if kind in kinds)
    for rank, line in enumerate(said):
        what = f"rank {rank}, call {line['call']} (planted: rank {program.rank}, call {program.place}): {line['words']}"
        if line["outcome"] in ("wrong", "crashed"):
            outcome.failures.append(f"{line['outcome']}: {what}")
        elif line["outcome"] == "raised" and not planted:
            outcome.failures.append(f"raised without a cause: {what}")
        elif line["outcome"] == "raised" and not (A_RANK.search(line["words"]) and CALLS.search(line["words"])):
            outcome.named = False
            outcome.failures.append(f"names no rank or no call: {what}")


def judge_end(outcome: Outcome, run: Launch, ended: bool, said: Sequence[dict[str, Any] | None]) -> None:
    """Hold a launch that ended in the midst of a program, or was hanging, to the promise."""
    program, errors = random_program(outcome.seed, outcome.ranks), run.errors
    outcome.kind = "ended" if ended else "hung"
    outcome.named = bool(A_RANK.search(errors) and CALLS.search(errors))
    states = [
        "not begun" if line is None else f"{line.get('outcome', 'in')} call {line['call']} {line.get('words', '')}"
        for line in said
    ]
    where = f"planted: rank {program.rank}, call {program.place}: {program.erring[program.place]}; {states}"
    if any(line is not None and line.get("outcome") == "wrong" for line in said):
        outcome.failures.append(f"wrong: {where}")
    if not ended:
        outcome.failures.append(f"hung: {where}")
    elif run.process.returncode == 0 or not outcome.named:
        outcome.failures.append(f"exit code {run.process.returncode}: {where}\n{tail(run)}")


def wait_while_it_goes_on(run: Launch, folder: Path, grace: float) -> bool:
    """Wait for a launch to end; False when it has said nothing new for too long."""
    seen, since = -1, time.monotonic()

    def stuck() -> bool:
        nonlocal seen, since
        size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
        if size != seen:
            seen, since = size, time.monotonic()
        return time.monotonic() - since > TIMEOUT + grace + (0 if seen else START)

    run.wait(BATCH * (TIMEOUT + grace) + START, stuck)
    return run.process.poll() is not None and not run.processes()


def resident(where: str, ranks: int, seeds: range, grace: float, work: Path) -> Iterator[Outcome]:
    """Play programs one after another; where one ends its launch, go on after it with another."""
    seed = seeds.start
    while seed < seeds.stop:
        folder = work / f"{where}-{ranks}-{seed}"
        batch = range(seed, min(seed + BATCH, seeds.stop))
        with launch(ranks, folder, where, seed, len(batch), timeout=TIMEOUT) as run:
            ended = wait_while_it_goes_on(run, folder, grace)
            said = read(folder, ranks)
            for seed in batch:
                outcome = Outcome(where, ERRORS[seed % len(ERRORS)], ranks, seed)
                lines = [lines.get(seed) for lines in said]
                complete = [line for line in lines if line is not None and "outcome" in line]
                if len(complete) == ranks:
                    judge(outcome, complete)
                else:
                    judge_end(outcome, run, ended, lines)
                yield outcome
                if len(complete) < ranks:
                    break
        seed += 1


def end_early(end: str, seed: int, grace: float, work: Path) -> Outcome:
    """A launch in which one rank ends before the others."""
    ranks = RANKS[seed % len(RANKS)]
    program, folder = random_program(seed, ranks), work / f"{end}-{seed}"
    outcome, limit = Outcome("each", end, ranks, seed), TIMEOUT_OF_ENDS + grace
    with launch(ranks, folder, end, seed, timeout=TIMEOUT_OF_ENDS) as run:
        run.wait(START, (folder / "planted").exists)
        if run.wait(limit):
            outcome.kind = "ended"
        else:
            outcome.kind = "hung"
            outcome.failures.append(f"not ended after {limit:.0f} s")
        code, errors = run.process.returncode, run.errors
        outcome.named = bool(re.search(rf"\branks? (?:\d+(?:, | and ))*{program.rank}\b", errors))
        if not (folder / "planted").exists():
            outcome.failures.append("it ended before anything was planted")
        if outcome.kind == "ended" and code == 0:
            outcome.failures.append("exit code 0")
        if not outcome.named:
            outcome.failures.append(f"rank {program.rank} is not named")
        if end in ("end", "stop") and not CALLS.search(errors):  # of the others nobody comes to wait in a call
            outcome.failures.append("no call is named")
        if outcome.failures:
            outcome.failures.append(f"said:\n{tail(run)}")
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each place and error."""
    kinds = ("raised", "ended", "right", "wrong", "crashed", "hung")
    lines = [f"| where | planted | programs | {' | '.join(kinds)} | named | failed |", "| --- | --- |" + " ---: |" * 9]
    for where, error in dict.fromkeys((outcome.where, outcome.error) for outcome in outcomes):
        rows = [outcome for outcome in outcomes if (outcome.where, outcome.error) == (where, error)]
        counts = Counter(row.kind for row in rows)
        named = sum(row.named for row in rows if row.kind not in ("right", "wrong"))
        cells = [where, error, len(rows), *(counts[kind] for kind in kinds), named, sum(bool(r.failures) for r in rows)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def measure(node: int, across: int, each: int, seed: int, grace: float) -> tuple[str, list[dict[str, Any]]]:
    """So many programs on one node and as if across nodes, over 2, 3 and 4 ranks, and launches with each early end.

    `grace` is the seconds after a time-out within which all must have ended or gone on.
    """
    outcomes: list[Outcome] = []

    def add(outcome: Outcome) -> None:
        outcomes.append(outcome)
        for failure in outcome.failures:
            print(
                f"{outcome.where}, {outcome.error}, {outcome.ranks} ranks, seed {outcome.seed}: {failure}", flush=True
            )

    with tempfile.TemporaryDirectory(prefix="faults-") as work:
        for where, count in (("node", node), ("across", across)):
            for index, ranks in enumerate(RANKS):
                share = range(seed + count * index // len(RANKS), seed + count * (index + 1) // len(RANKS))
                for outcome in resident(where, ranks, share, grace, Path(work)):
                    add(outcome)
                print(f"{where}, {ranks} ranks: {len(share)} programs played", flush=True)
        with ThreadPoolExecutor(2) as pool:  # most of the time they wait
            for outcome in pool.map(
                lambda job: end_early(*job, grace, Path(work)), [(e, seed + n) for e in ENDS for n in range(each)]
            ):
                add(outcome)
    return table(outcomes), [asdict(outcome) for outcome in outcomes]
