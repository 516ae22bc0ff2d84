"""First process in the lab's namespaces: builds the cluster and runs mpiexec in it. All processes end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from unisono.errors import LabError
from unisono.lab.mpiexec import ENTER, enter_script, lab_environment, mpiexec_command
from unisono.lab.plan import HOME, MACHINE_TMP, NAMESPACE_KINDS, OTHER_TMP, Command, Lab, commands, hosts_file
from unisono.launch import launch_environment


def main(arguments: Sequence[str]) -> int:
    """Build the lab and run the command in it; return the exit code, 2 where the lab cannot be built.

    The outer process passes SUPERNODES HOSTS RATE OVERSUBSCRIBE RANKS_PER_HOST MPIEXEC COMMAND...
    """
    signal.signal(signal.SIGINT, _wait_for_the_end)
    supernodes, hosts, rate, oversubscribe, ranks_per_host, mpiexec, *command = arguments
    lab = Lab(int(supernodes), int(hosts), int(rate), float(oversubscribe), int(ranks_per_host))
    try:
        build(lab)
    except LabError as error:
        print(f"unisono: {error}", file=sys.stderr)
        return 2
    return run(lab, mpiexec, command)


def build(lab: Lab) -> None:
    """Run the commands of the plan. Raises LabError naming the command that is refused."""
    _run_checked(("mount", "-t", "tmpfs", "-o", "mode=1777", "lab", "/dev/shm"))
    _write_files(lab)
    for command in commands(lab):
        _run_checked(command)


def run(lab: Lab, mpiexec: str, command: Sequence[str]) -> int:
    """Run the command on every host; return the exit code of mpiexec."""
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    environment = lab_environment(launch_environment(os.environ, sys.stdout.isatty()))
    full = mpiexec_command(lab, mpiexec, version, str(Path.cwd()), command)
    code = subprocess.run(full, env=environment, check=False).returncode
    return code if code >= 0 else 128 - code


def _write_files(lab: Lab) -> None:
    """Write the files that the plan's commands need."""
    for host in lab.members:
        Path(HOME, host.name, "shm").mkdir(parents=True)
        for kind in NAMESPACE_KINDS:
            Path(HOME, host.name, kind).touch()
    Path(MACHINE_TMP).mkdir(parents=True)
    for path in Path("/tmp").iterdir():
        Path(OTHER_TMP, path.name).symlink_to(Path(MACHINE_TMP).relative_to(OTHER_TMP) / path.name)
    known = Path("/etc/hosts")
    Path(HOME, "hosts").write_text(hosts_file(lab, known.read_text() if known.exists() else ""))
    Path(ENTER).write_text(enter_script())
    Path(ENTER).chmod(0o755)


def _run_checked(command: Command) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"cannot build the lab: `{' '.join(command)}` failed: {reason}")


def _wait_for_the_end(_number: int, _frame: FrameType | None) -> None:
    """Wait to be killed: the terminal interrupts every process, and the outer one answers by killing this one."""
    signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
