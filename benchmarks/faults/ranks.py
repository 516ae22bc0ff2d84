"""Signals to `unisono train` at random moments: who ends, who is named, what is left behind, what can be resumed."""

from __future__ import annotations

import hashlib
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launches import POLL, Launch, shared_files, tail

ROOT = Path(__file__).parents[2]
RANKS, TIMEOUT, NAMED_WITHIN = 3, 15, 15.0
SETTINGS = {
    "training.epochs": "10",
    "training.checkpoint_every": "10",
    "compute.convolutions": "library",
    "rule.overlap": "chain",
    "exchange.bucket_megabytes": "1",
}
ALL_END, WHOLE_RUN = 30.0, 240.0
"""Seconds within which all processes end after a fault; that a run may take."""


@dataclass(frozen=True)
class Fault:
    """A signal, and whom it goes to when."""

    signal: signal.Signals
    launcher: bool = False
    startup: bool = False

    @property
    def name(self) -> str:
        """The fault in words."""
        return f"{self.signal.name} to {'the launcher' if self.launcher else 'a rank'}{' at start-up' * self.startup}"

    @property
    def limit(self) -> float:
        """Seconds within which all processes end."""
        return ALL_END + (TIMEOUT if self.signal is signal.SIGSTOP else 0)

    def promised(self, code: int | None) -> bool:
        """True for an exit code that the fault may end with."""
        if self.signal is signal.SIGTERM and not self.startup:
            return code == 128 + signal.SIGTERM
        return code not in (None, 0)


KINDS = [(signum, False) for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT)]
KINDS += [(signum, True) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)]


@dataclass
class Outcome:
    """One run: what went wrong is in `failures`."""

    fault: str
    seed: int
    ended: bool = False
    named: float | None = None
    code: int | None = None
    left: list[str] = field(default_factory=list)
    equal: bool = False
    failures: list[str] = field(default_factory=list)
    said: str = ""


@dataclass(frozen=True)
class Reference:
    """The run that nobody disturbs."""

    digest: str
    to_begin: float
    """Seconds until the run's folder is there."""
    to_end: float
    """Seconds from then on."""


def command(folder: Path, resume: bool = False) -> list[str]:
    """`unisono train` into a folder."""
    train = [sys.executable, "-m", "unisono", "train"]
    if resume:
        return [*train, "--resume", str(folder)]
    options = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    return [*train, "digits", f"--ranks={RANKS}", f"--run={folder}", *options]


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(int(path.name.partition("-")[2]) for path in (folder / "checkpoints").glob("step-" + 9 * "[0-9]"))


def digest(folder: Path) -> str:
    """The last checkpoint: its step, and the SHA-256 of weights and optimizer."""
    if not (saved := steps(folder)):
        return "no checkpoint"
    last = folder / "checkpoints" / f"step-{saved[-1]:09d}"
    sums = [
        hashlib.sha256((last / f"{name}.safetensors").read_bytes()).hexdigest() for name in ("weights", "optimizer")
    ]
    return " ".join([str(saved[-1]), *sums])


def undisturbed(work: Path) -> Reference:
    """Train once, to the end."""
    folder = work / "reference"
    with Launch(command(folder), work) as run:
        run.wait(WHOLE_RUN, (folder / "recipe.toml").exists)
        begun = time.monotonic()
        if not run.wait(WHOLE_RUN) or run.process.returncode != 0:
            sys.exit(f"the undisturbed run failed, exit code {run.process.returncode}:\n{tail(run)}")
    return Reference(digest(folder), begun - run.begun, time.monotonic() - begun)


def wait_for_moment(run: Launch, fault: Fault, rng: random.Random, folder: Path, reference: Reference) -> bool:
    """Wait for a random moment; False when the run was over, or had begun, before."""
    begun = (folder / "recipe.toml").exists
    if fault.startup:
        run.wait(WHOLE_RUN, lambda: fault.launcher or len(run.ranks()) == RANKS)
        time.sleep(rng.uniform(0.05, 0.6) * reference.to_begin * (1 if fault.launcher else 0.7))
        return not begun() and run.process.poll() is None
    run.wait(WHOLE_RUN, begun)
    time.sleep(rng.uniform(0.0, 0.8) * reference.to_end)
    return run.process.poll() is None


def disturb(fault: Fault, seed: int, work: Path, reference: Reference) -> Outcome:
    """One run with a fault, and what comes of it."""
    for attempt in range(5):
        rng = random.Random(f"{fault.name} {seed} {attempt}")
        folder = work / f"{fault.name.replace(' ', '-')}-{seed}-{attempt}"
        rank, before = rng.randrange(RANKS), shared_files()
        with Launch(command(folder), work, {"UNISONO_TIMEOUT": str(TIMEOUT)}) as run:
            if not wait_for_moment(run, fault, rng, folder, reference):
                continue
            outcome, had = Outcome(fault.name, seed), steps(folder)
            said = len(run.output), len(run.errors)
            if not send(run, fault, rank):
                continue
            watch(run, fault, rank, outcome, said)
            outcome.said = tail(run)
        left = shared_files() - before
        judge(outcome, fault, left, steps(folder), had)
        resume(outcome, folder, work, reference)
        outcome.said = outcome.said if outcome.failures else ""
        return outcome
    return Outcome(fault.name, seed, failures=["no run could be disturbed in time: all were over before"])


def send(run: Launch, fault: Fault, rank: int) -> bool:
    """Send the signal; False when there is nobody any more."""
    if fault.launcher:
        run.process.send_signal(fault.signal)
        return True
    target = run.ranks().get(rank)
    return target is not None and run.signal(target, fault.signal)


def watch(run: Launch, fault: Fault, rank: int, outcome: Outcome, before: tuple[int, int]) -> None:
    """Wait for the end of all, and note when the rank is named: after what had been said `before` the signal."""
    sent = time.monotonic()
    mention = re.compile(rf"\branks? (?:\d+(?:, | and ))*{rank}\b")

    def named() -> bool:
        said = run.errors[before[1] :]
        if fault.signal is signal.SIGTERM:  # obeyed: no error
            said += run.output[before[0] :]
        if outcome.named is None and mention.search(said):
            outcome.named = time.monotonic() - sent
        return False

    outcome.ended = run.wait(fault.limit, named)
    named()
    outcome.code = run.process.poll()
    if not outcome.ended:
        names = [f"{process.pid} ({process.command[:60]})" for process in run.processes()]
        outcome.failures.append(f"not ended after {fault.limit:.0f} s: {', '.join(names)}")
    if not fault.launcher and (outcome.named is None or outcome.named > NAMED_WITHIN + POLL):
        when = "never" if outcome.named is None else f"after {outcome.named:.1f} s"
        outcome.failures.append(f"rank {rank} was named {when}")


def judge(outcome: Outcome, fault: Fault, left: set[str], has: Sequence[int], had: Sequence[int]) -> None:
    """Hold exit code, files and checkpoints to what is promised."""
    if not fault.promised(outcome.code):
        outcome.failures.append(f"exit code {outcome.code}")
    outcome.left = sorted(left)
    if left:
        outcome.failures.append(f"left behind: {', '.join(outcome.left)}")
    if fault.signal is signal.SIGTERM and not fault.startup and max(has, default=-1) <= max(had, default=-1):
        outcome.failures.append(f"no checkpoint was saved: the newest is {max(has, default=None)}")


def resume(outcome: Outcome, folder: Path, work: Path, reference: Reference) -> None:
    """Go on with the run, or begin it where there is none yet, and compare the end."""
    with Launch(command(folder, resume=(folder / "recipe.toml").exists()), work) as run:
        if not run.wait(WHOLE_RUN) or run.process.returncode != 0:
            outcome.failures.append(f"resuming ended with {run.process.returncode}")
            outcome.said += f"\n      resumed:\n{tail(run)}"
            return
    outcome.equal = digest(folder) == reference.digest
    if not outcome.equal:
        outcome.failures.append(
            f"resumed, it ends with {digest(folder)[:20]}..., undisturbed {reference.digest[:20]}..."
        )


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each fault."""
    lines = ["| fault | runs | ended | rank named in time | median, max s | exit codes | left files | resumed equal |"]
    lines.append("| --- |" + " ---: |" * 7)
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        rows = [outcome for outcome in outcomes if outcome.fault == name]
        times = [row.named for row in rows if row.named is not None]
        took = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "-"
        named = "-" if "launcher" in name else str(sum(time <= NAMED_WITHIN + POLL for time in times))
        codes = ", ".join(f"{code} x{count}" for code, count in Counter(row.code for row in rows).items())
        cells = [name, len(rows), sum(row.ended for row in rows), named, took if named != "-" else "-", codes]
        cells += [sum(bool(row.left) for row in rows), sum(row.equal for row in rows)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def measure(runs: int, startup: int, only: str, seed: int) -> tuple[str, list[dict[str, Any]]]:
    """All faults: `runs` times each while it trains, `startup` of any kind before. The table, and each outcome."""
    faults = [(Fault(*kind), run_seed) for kind in KINDS for run_seed in range(seed, seed + runs)]
    faults += [
        (Fault(*KINDS[run_seed % len(KINDS)], startup=True), run_seed) for run_seed in range(seed, seed + startup)
    ]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="faults-") as work:
        reference = undisturbed(Path(work))
        print(f"undisturbed: {reference.to_begin:.1f} s to begin, {reference.to_end:.1f} s to the end", flush=True)
        for fault, run_seed in faults:
            if only not in fault.name:
                continue
            outcome = disturb(fault, run_seed, Path(work), reference)
            outcomes.append(outcome)
            print(f"{fault.name}, seed {run_seed}: {'; '.join(outcome.failures) or 'as promised'}", flush=True)
            if outcome.failures:
                print(outcome.said, flush=True)
    return table(outcomes), [asdict(outcome) for outcome in outcomes]
