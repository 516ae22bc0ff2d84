"""Launches whose processes can all be found again, signalled and ended: each carries a mark in its environment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

MARK = "UNISONO_FAULTS_LAUNCH"
PRIVATE = "UNISONO_FAULTS_PRIVATE"
"""Set where /dev/shm and /tmp are this program's own."""

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID")
OURS = ("mpich_", "hydra_", "unisono", "ompi", "prte", "sem.mp", "psm")
"""Beginnings of names that count as left behind where others use /dev/shm and /tmp too."""

POLL = 0.1
"""Seconds between two looks at /proc."""


@dataclass(frozen=True)
class Process:
    """A process of a launch."""

    pid: int
    parent: int
    rank: int | None
    """As its launcher has set it; also in the environment of the rank's children."""
    command: str


def own_shared_folders() -> None:
    """Start this program anew where /dev/shm and /tmp are its own: nobody else's files are counted. Needs root."""
    if PRIVATE in os.environ or os.geteuid() or shutil.which("unshare") is None:
        return
    mounts = 'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mounts, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        os.execvpe(command[0], [*command, sys.executable, *sys.argv], {**os.environ, PRIVATE: "1"})


def shared_files() -> set[str]:
    """Names in /dev/shm and /tmp: all where these folders are private, else those that may come from a launch."""
    paths = {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()}
    return paths if PRIVATE in os.environ else {path for path in paths if Path(path).name.startswith(OURS)}


class Launch:
    """A command, the files that it writes to, and all processes that come of it. Leaving the block ends them all."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.mark, self.begun = f"{MARK}={uuid.uuid4().hex}", time.monotonic()
        index = len(list(folder.glob("*.err")))
        self._out, self._err = folder / f"{index}.out", folder / f"{index}.err"
        name, _, value = self.mark.partition("=")
        variables = {**os.environ, "COLUMNS": "200", **(environment or {}), name: value}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables, start_new_session=True
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def output(self) -> str:
        """Standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def errors(self) -> str:
        """Standard error so far."""
        return self._err.read_text(errors="replace")

    def processes(self) -> list[Process]:
        """All processes of this launch that have not ended."""
        processes = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError, ValueError):  # it has ended, or is somebody else's
                    processes += self._read(folder)
        return processes

    def _read(self, folder: Path) -> list[Process]:
        lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        if self.mark not in lines:
            return []
        variables = dict(line.partition("=")[::2] for line in lines)
        rank = next((int(variables[name]) for name in RANK_VARIABLES if name in variables), None)
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        return [Process(int(folder.name), parent, rank, command)]

    def ranks(self) -> dict[int, Process]:
        """The process of each rank, not those that a rank has started."""
        by_pid = {process.pid: process for process in self.processes() if process.rank is not None}
        return {
            process.rank: process
            for process in by_pid.values()
            if process.parent not in by_pid and process.rank is not None
        }

    def signal(self, process: Process, signum: int) -> bool:
        """Send a signal to a process of this launch, never to another that has got its number since."""
        with suppress(ProcessLookupError, OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                if self._read(Path(f"/proc/{process.pid}")):
                    signal.pidfd_send_signal(descriptor, signum)
                    return True
            finally:
                os.close(descriptor)
        return False

    def wait(self, seconds: float, look: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all processes have ended, or `look` says so; False after so many seconds."""
        give_up = time.monotonic() + seconds
        while True:
            self.process.poll()
            if look():
                return True
            if not self.processes():
                self.process.wait()  # it has given its memory back, but may not be done with ending
                return True
            if time.monotonic() > give_up:
                return False
            time.sleep(POLL)

    def end(self) -> None:
        """Kill all that is left."""
        while left := self.processes():
            for process in left:
                self.signal(process, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()


def tail(launch: Launch, lines: int = 12) -> str:
    """The last lines of what a launch has said, indented."""
    said = [*launch.output.splitlines()[-3:], *launch.errors.splitlines()[-lines:]]
    return "\n".join(f"        {line[:200]}" for line in said)
