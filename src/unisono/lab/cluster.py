"""Run of a command on a lab's cluster, which is removed completely, however the command ends.

    unisono lab ── setpriv, which becomes unshare ──┬── unisono.lab.inside ── mpiexec ── the hosts' helpers ── ranks
                                                    │
                                                    └ here the namespaces begin: network, mounts, names, processes

The cluster lives in namespaces of its own, whose first process is `inside`. When `inside` ends, the kernel kills every
process in them and removes their links and files. `inside` is killed when unshare dies; unshare, when this one dies.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from unisono.errors import LabError
from unisono.lab.plan import Command, Lab

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""Programs that build a lab, and the Debian packages that provide them."""

NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
ISOLATE: Command = ("setpriv", "--pdeathsig", "KILL", "--", "unshare", *NAMESPACES, "--")


def run(lab: Lab, mpiexec: Path, command: Sequence[str]) -> int:
    """Run `command` on every host of `lab`. Return its exit code, or 130 and 143 after SIGINT and SIGTERM.

    Raises LabError where no lab can be built, or `mpiexec` is no program.
    """
    check_machine()
    if shutil.which(mpiexec) is None:
        raise LabError(f"--mpiexec {mpiexec}: there is no such program")
    given = json.dumps(asdict(lab)), str(mpiexec.absolute()), *command
    inside = (sys.executable, "-P", "-m", "unisono.lab.inside", *given)
    with subprocess.Popen((*ISOLATE, *inside)) as process:
        return _wait(process)


def check_machine() -> None:
    """Raise LabError where no lab can be built, naming what is missing."""
    if os.geteuid() != 0:
        raise LabError("a lab is built of network namespaces, which takes root; try sudo")
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            raise LabError(f"there is no `{program}` on PATH; install {package}, or add /usr/sbin to PATH")
    probe = subprocess.run((*ISOLATE, "true"), capture_output=True, text=True, check=False)
    if probe.returncode:
        reason = " ".join(probe.stderr.split()) or f"exit code {probe.returncode}"
        raise LabError(f"the kernel refuses new namespaces ({reason}); in a container, it must be a privileged one")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the lab, which a signal ends early."""
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        _end(process)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill unshare, and wait until the kernel has ended every process of the namespaces."""
    first: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        first = [os.pidfd_open(int(number)) for number in children]
    process.kill()
    for descriptor in first:
        select.select([descriptor], [], [])  # it can be read when the process has ended
        os.close(descriptor)
