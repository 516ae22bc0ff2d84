from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.training.sweep.grid import OUTPUT, RunOutcome, RunStatus, Sweep, create_or_open
from unisono.training.sweep.run import StopSignals, error_line, exit_code, outcome_of, run_points

Plan = Callable[..., Sweep]
ENDED, FAILED = RunOutcome(RunStatus.ENDED, 0), RunOutcome(RunStatus.FAILED, 1, "ValueError: no such rate")


def make(sweep: Sweep, program: tuple[str, ...], before: dict[str, RunOutcome] | None = None) -> list[RunOutcome]:
    """Outcomes of the runs that were made."""
    made = []
    outcomes = before or {point.name: RunOutcome() for point in sweep.grid.points()}
    assert run_points(sweep, outcomes, lambda _, outcome: made.append(outcome), program) is None
    return made


def test_a_run_that_fails_does_not_end_the_others(program: tuple[str, ...], planned: Plan) -> None:
    sweep = planned("optimizer.learning_rate=0.1,666,0.2")
    create_or_open(sweep)
    assert make(sweep, program) == [ENDED, FAILED, ENDED]
    folder = sweep.folder / "2-learning_rate=666"
    output = (folder / OUTPUT).read_text()
    assert output.startswith(f"$ unisono train sweep/recipes/{folder.name}.toml --run=sweep/{folder.name}\nTraceback")


def test_runs_that_ended_are_skipped_and_others_resumed(program: tuple[str, ...], planned: Plan) -> None:
    sweep = planned("optimizer.learning_rate=0.1,666,0.2")
    create_or_open(sweep)
    names = [point.name for point in sweep.grid.points()]
    outcomes = dict(zip(names, make(sweep, program), strict=True))
    Path("repaired").touch()
    assert make(sweep, program, outcomes) == [ENDED]
    assert f"$ unisono train --resume=sweep/{names[1]}\nresumed\n" in (sweep.folder / names[1] / OUTPUT).read_text()
    (sweep.folder / names[0] / "metrics.jsonl").unlink()
    assert make(sweep, program, dict.fromkeys(names, ENDED)) == [ENDED]


def test_ctrl_c_in_a_terminal_does_not_reach_the_run(program: tuple[str, ...], planned: Plan) -> None:
    """A terminal sends SIGINT to the process group of the sweep, which would end the run without a checkpoint."""
    sweep = planned("optimizer.learning_rate=0.1,0.2")
    create_or_open(sweep)
    make(sweep, program)
    assert int(Path("group").read_text()) != os.getpgid(0)


def interrupt(*numbers: int) -> threading.Thread:
    """Send signals to this process once the run is ready, the next one when the run has got the last."""

    def send() -> None:
        until = time.monotonic() + 60
        for signum in numbers:
            while not Path("ready").exists() and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signum)
            while signum == signal.SIGUSR1 and not Path("usr1").exists() and time.monotonic() < until:
                time.sleep(0.01)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.usefixtures("nothing_ignored")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_the_current_run_and_ends_the_sweep(
    program: tuple[str, ...], planned: Plan, signum: signal.Signals
) -> None:
    """SIGUSR1 before it ends nothing."""
    sweep = planned("optimizer.learning_rate=0.1,777,0.2")
    create_or_open(sweep)
    names = [point.name for point in sweep.grid.points()]
    outcomes = dict.fromkeys(names, RunOutcome())
    earlier = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]
    sender = interrupt(signal.SIGUSR1, signum)
    received = run_points(sweep, outcomes, lambda point, outcome: outcomes.update({point.name: outcome}), program)
    sender.join()
    assert received == signum
    assert Path("usr1").exists()
    assert Path("ignored").read_text() == "True", "before the run has a handler of its own"
    assert list(outcomes.values()) == [ENDED, RunOutcome(RunStatus.INTERRUPTED, 143), RunOutcome()]
    assert exit_code(outcomes, received) == 128 + signum
    assert not (sweep.folder / names[2]).exists()
    assert earlier == [
        signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    ]


@pytest.mark.parametrize(
    ("outcomes", "received", "expected"),
    [
        ([ENDED, ENDED], None, 0),
        ([ENDED, ENDED], signal.SIGTERM, 0),  # the last run was done
        ([ENDED, FAILED], None, 1),
        ([ENDED, RunOutcome(RunStatus.INTERRUPTED, 143)], None, 1),  # a rank was told, not the sweep
        ([ENDED, RunOutcome()], signal.SIGTERM, 143),
        ([FAILED, RunOutcome()], signal.SIGINT, 130),
    ],
)
def test_exit_codes(outcomes: list[RunOutcome], received: int | None, expected: int) -> None:
    assert exit_code({str(index): outcome for index, outcome in enumerate(outcomes)}, received) == expected


def test_outcomes() -> None:
    assert outcome_of(0, "unisono: a warning") == ENDED
    assert [outcome_of(code, "").status for code in (130, 143)] == [RunStatus.INTERRUPTED] * 2
    assert outcome_of(137, "epoch 1\n\n") == RunOutcome(RunStatus.FAILED, 137, "epoch 1")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", ""),
        ("unisono: cannot write a\n=== BAD TERMINATION ===\n", "unisono: cannot write a"),
        ("torch.OutOfMemoryError: 4 GiB\nunisono: rank 1 ended unexpectedly\n", "torch.OutOfMemoryError: 4 GiB"),
        ("a/b.py:3: UserWarning: slow\nunisono: rank 1 of 2 ended\n", "unisono: rank 1 of 2 ended"),
    ],
)
def test_the_error_line(output: str, expected: str) -> None:
    assert error_line(output) == expected


def test_a_folder_that_cannot_be_written_is_named(program: tuple[str, ...], planned: Plan) -> None:
    sweep = planned("optimizer.learning_rate=0.1,0.2")
    create_or_open(sweep)
    name = sweep.grid.points()[0].name
    (sweep.folder / name).write_text("a file")
    with pytest.raises(
        UsageError, match=re.escape(f"cannot run {name}: sweep/{name}/output.txt: File exists; repair that")
    ):
        make(sweep, program)


LONG = "import time\ntime.sleep(30)"


def test_a_signal_before_the_run_is_known_still_ends_it() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with subprocess.Popen([sys.executable, "-c", LONG], process_group=0) as process:
            assert signals.wait(process) == 143
        assert signals.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)  # the process is gone; the first signal counts
        assert signals.received == signal.SIGTERM


def test_ignored_signals_stay_ignored() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)
