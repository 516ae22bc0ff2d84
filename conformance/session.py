"""One mpiexec after the other, each running tests until one of them ends badly; watched from outside.

this process                      ranks
store: plan                  -->  read the tests
store: outcome/NUMBER/RANK   <--  tell what came of each test
too late, or gone?  kill; start again with the next test
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from outcomes import CRASHED, FAILED, HUNG, Outcome, combine
from unisono.launch import find_mpiexec, launch_environment

SUITE = Path(__file__).parent / "suite.py"
START = 120.0
"""Seconds in which ranks have to start: importing PyTorch takes several on a busy machine."""
GRACE = 10.0
"""Seconds that ranks have after another one failed; they may wait for it for as long as a group's time-out."""


class Ranks:
    """Ranks under mpiexec that run tests; killed, whatever state they are in, at the end of the block."""

    def __init__(self, backend: str, ranks: int, tests: Sequence[str], profiling: bool) -> None:
        self.ranks = ranks
        self.folder = tempfile.TemporaryDirectory(prefix="conformance-")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1))
        plan = {"ranks": ranks, "tests": list(tests), "folder": self.folder.name, "profiling": profiling}
        self.store.set("plan", json.dumps(plan))
        self.log = Path(self.folder.name) / "log"
        command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, str(SUITE), backend, str(self.store.port)]
        environment = {**launch_environment(os.environ, terminal=False), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.mpiexec = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        """Kill what is left. The ranks are named: mpiexec's own children may have left its group."""
        for process in [*self.processes(), self.mpiexec.pid]:
            signal_to(process, signal.SIGKILL)
        self.mpiexec.wait()
        self.folder.cleanup()

    def processes(self) -> list[int]:
        """The ranks that have started, as processes."""
        names = [f"process/{rank}" for rank in range(self.ranks)]
        return [int(self.store.get(name)) for name in names if self.store.check([name])]

    def tail(self) -> str:
        """The end of what the ranks have written."""
        return self.log.read_text(errors="replace")[-6000:]

    def started(self) -> bool:
        """Wait until all ranks have started; False if they don't."""
        deadline = time.monotonic() + START
        while len(self.processes()) < self.ranks:
            if time.monotonic() > deadline or self.mpiexec.poll() is not None:
                return False
            time.sleep(0.1)
        return True

    def outcomes(self, number: int) -> list[Outcome]:
        """What the ranks that are done with a test say about it."""
        names = [f"outcome/{number}/{rank}" for rank in range(self.ranks)]
        return [Outcome(*json.loads(self.store.get(name))) for name in names if self.store.check([name])]

    def outcome(self, number: int, limit: float) -> Outcome:
        """Wait for what comes of a test on all ranks, for so many seconds."""
        begun = time.monotonic()
        deadline = begun + limit
        while len(found := self.outcomes(number)) < self.ranks:
            if not all(outcome.clean for outcome in found):
                deadline = min(deadline, time.monotonic() + GRACE)
            if self.mpiexec.poll() is not None and len(self.outcomes(number)) < self.ranks:
                reason = f"the ranks ended with exit code {self.mpiexec.returncode}"
                return combine([*found, Outcome(CRASHED, reason, self.tail(), round(time.monotonic() - begun, 2))])
            if time.monotonic() > deadline:
                return self.overdue(number, begun)
            time.sleep(0.02)
        return combine(found)

    def overdue(self, number: int, begun: float) -> Outcome:
        """A test that ran out of time: where ranks hang, and why, if another one's failure makes them wait."""
        seconds = round(time.monotonic() - begun, 2)
        found = self.outcomes(number)
        hung = f"{self.ranks - len(found)} of {self.ranks} ranks had not ended"
        for process in self.processes():
            signal_to(process, signal.SIGUSR1)
        time.sleep(1)  # for the ranks to write their stacks
        if all(outcome.clean for outcome in found):
            return Outcome(HUNG, hung, self.tail(), seconds)
        failed = combine(found)
        return Outcome(FAILED, f"{failed.reason} ({hung})", f"{failed.details}\n{self.tail()}", seconds)

    def ended(self) -> str:
        """After the last test: what was wrong with the end of the ranks, or nothing."""
        try:
            code = self.mpiexec.wait(timeout=30)
        except subprocess.TimeoutExpired:
            return "the ranks did not end after the last test"
        return f"the ranks ended with exit code {code}: {self.tail()}" if code else ""


def signal_to(process: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def play(
    backend: str, ranks: int, tests: Sequence[str], limit: float, profiling: bool
) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of tests in their order; fresh processes follow each test that does not end well."""
    done = 0
    while done < len(tests):
        with Ranks(backend, ranks, tests[done:], profiling) as session:
            if not session.started():
                raise RuntimeError(f"{ranks} ranks did not start:\n{session.tail()}")
            first = done
            while done < len(tests):
                outcome = session.outcome(done - first, limit)
                done += 1
                bad_end = session.ended() if outcome.clean and done == len(tests) else ""
                if bad_end:
                    outcome = Outcome(CRASHED, bad_end.splitlines()[0], bad_end, outcome.seconds)
                yield tests[done - 1], outcome
                if not outcome.clean:
                    break
