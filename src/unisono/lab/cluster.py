"""Run of a command on a lab's cluster, which is removed completely, however the command ends.

    unisono lab ── setpriv, which becomes unshare ──┬── unisono.lab.cluster ── mpiexec ── the hosts' helpers ── ranks
                                                    │
                                                    └ here the namespaces begin: network, mounts, names, processes

The cluster lives in namespaces of its own. When their first process ends, the kernel kills every process in them and
removes their links and files. It is killed when unshare dies; unshare, when this one dies.

`unisono.lab.cluster`, started as a program, is that first process: it builds the cluster and runs mpiexec in it. Two
families of launchers are known, MPICH's hydra and Open MPI's. Both reach a host by running `ssh HOST COMMAND`, and both
accept another program in place of ssh.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from unisono.errors import LabError
from unisono.lab.plan import HEAD, HOME, MACHINE_TMP, NAMESPACE_KINDS, OTHER_TMP, Command, Lab, commands, hosts_file
from unisono.launch import is_open_mpi, launch_environment

PACKAGES = dict.fromkeys(("ip", "tc"), "iproute2") | dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux")
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
    inside = (sys.executable, "-P", "-m", "unisono.lab.cluster", json.dumps(asdict(lab)), str(mpiexec.absolute()))
    with subprocess.Popen((*ISOLATE, *inside, *command)) as process:
        return _wait(process)


def check_machine() -> None:
    """Raise LabError where no lab can be built, naming what is missing."""
    if os.geteuid() != 0:
        raise LabError("a lab is built of network namespaces, which takes root; try sudo")
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            raise LabError(f"there is no `{program}` on PATH; install {package}, or add /usr/sbin to PATH")
    if reason := _failure((*ISOLATE, "true")):
        raise LabError(f"the kernel refuses new namespaces ({reason}); in a container, it must be a privileged one")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the lab, which a signal ends early."""
    received: list[int] = []

    def end(signum: int, _frame: FrameType | None) -> None:
        """Kill unshare, and wait until the kernel has ended every process of the namespaces."""
        received.append(signum)
        first: list[int] = []
        with suppress(FileNotFoundError, ProcessLookupError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            first = [os.pidfd_open(int(pid)) for pid in children]
        process.kill()
        for descriptor in first:
            select.select([descriptor], [], [])  # it can be read when the process has ended
            os.close(descriptor)

    before = {signum: signal.signal(signum, end) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return 128 + received[0] if received else _exit_code(code)


def _exit_code(returned: int) -> int:
    """Return the exit code of a process as a shell gives it, given its return code: a signal is negative there."""
    return returned if returned >= 0 else 128 - returned


ENTER = f"{HOME}/enter"

UNCOVER = 'umount --lazy /tmp && cd "$0" && exec "$@"'
"""First command of a rank: leave the /tmp of the launcher's helper, and change to the rank's own folder."""


def main(arguments: Sequence[str]) -> int:
    """Build the lab and run the command in it; return the exit code, 2 where the lab cannot be built.

    The outer process passes LAB, as JSON, MPIEXEC COMMAND...
    """
    # The terminal interrupts every process, and the outer one answers by killing this one.
    signal.signal(signal.SIGINT, lambda *_: signal.pause())
    described, mpiexec, *command = arguments
    lab = Lab(**json.loads(described))
    try:
        build(lab)
    except LabError as error:
        print(f"unisono: {error}", file=sys.stderr)
        return 2
    environment = lab_environment(launch_environment(os.environ, sys.stdout.isatty()))
    full = mpiexec_command(lab, mpiexec, is_open_mpi(Path(mpiexec)), str(Path.cwd()), command)
    with subprocess.Popen(full, env=environment) as process:
        while process.returncode is None:  # reap what others leave behind, too: this is the first process
            pid, status = os.wait()
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
    return _exit_code(process.returncode)


def build(lab: Lab) -> None:
    """Write the files of the plan, and run its commands. Raises LabError naming the command that is refused."""
    _run_checked(("mount", "-t", "tmpfs", "-o", "mode=1777", "lab", "/dev/shm"))
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
    for command in tuple(commands(lab)):  # all of them are known before the first is run
        _run_checked(command)


def _run_checked(command: Command) -> None:
    if reason := _failure(command):
        raise LabError(f"cannot build the lab: `{' '.join(command)}` failed: {reason}")


def _failure(command: Command) -> str:
    """Return the reason why a command fails; empty if it does not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (" ".join(done.stderr.split()) or f"exit code {done.returncode}") if done.returncode else ""


def enter_script() -> str:
    """Return the script in place of ssh: enter [-OPTION...] HOST COMMAND... runs the command on that host.

    The first command there is the launcher's helper. Hydra's leaves a file in /tmp when it is killed, so it gets
    another /tmp.
    """
    namespaces = " ".join(f"--{kind}={HOME}/$host/{kind}" for kind in NAMESPACE_KINDS)
    mounts = f"mount --rbind {OTHER_TMP} /tmp && mount --bind {HOME}/$host/shm /dev/shm && mount -t sysfs lab /sys"
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter {namespaces} -- unshare --mount -- sh -c "{mounts} && $*"
"""


HYDRA = ("-launcher", "ssh", "-launcher-exec", ENTER, "-localhost", HEAD)

OPEN_MPI = (
    *("--prtemca", "plm_ssh_agent", ENTER, "--prtemca", "plm_ssh_no_tree_spawn", "1"),
    *("--prtemca", "prte_tmpdir_base", "/dev/shm"),
    *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm", "--mca", "osc", "^ucx"),
    *("--bind-to", "none", "--wdir", "/"),
)
"""Options of Open MPI: labhead starts all helpers, and no rank is bound, as every host counts from core 0."""


def mpiexec_command(lab: Lab, mpiexec: str, open_mpi: bool, folder: str, command: Sequence[str]) -> Command:
    """Return the command that runs `command` in `folder` on every host; mpiexec is Open MPI's or hydra's."""
    names, each = [host.name for host in lab.members], str(lab.ranks_per_host)
    options: Command = (*HYDRA, "-hosts", ",".join(names), "-ppn", each, "-wdir", "/")
    if open_mpi:
        options = (*OPEN_MPI, "--host", ",".join(f"{name}:{each}" for name in names))
    return (mpiexec, *options, "unshare", "--mount", "--", "sh", "-c", UNCOVER, folder, *command)


def lab_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: `environment`, with UCX kept from bypassing the network."""
    return {**environment, "UCX_TLS": "tcp,self"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
