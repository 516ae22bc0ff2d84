"""Start of ranks on the hosts of a lab: the options and environment of mpiexec, and the script in place of ssh.

Two families of launchers are known, MPICH's hydra and Open MPI's. Both reach a host by running `ssh HOST COMMAND`, and
both accept another program in place of ssh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.lab.plan import HEAD, HOME, NAMESPACE_KINDS, OTHER_TMP, Command, Lab

ENTER = f"{HOME}/enter"

OPEN_MPI = "Open MPI"
"""Name of Open MPI in its mpiexec's version text."""

UNCOVER = 'umount --lazy /tmp && cd "$0" && exec "$@"'
"""First command of a rank: leave the /tmp of the launcher's helper, and change to the rank's own folder."""


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


def mpiexec_command(lab: Lab, mpiexec: str, version: str, folder: str, command: Sequence[str]) -> Command:
    """Return the command that runs `command` in `folder` on every host; `version` is mpiexec's version text."""
    uncovered = ("unshare", "--mount", "--", "sh", "-c", UNCOVER, folder, *command)
    if OPEN_MPI in version:
        return (mpiexec, *_open_mpi(lab), *uncovered)
    return (mpiexec, *_hydra(lab), *uncovered)


def _hydra(lab: Lab) -> Command:
    names = ",".join(host.name for host in lab.members)
    ssh = ("-launcher", "ssh", "-launcher-exec", ENTER, "-localhost", HEAD)
    return (*ssh, "-hosts", names, "-ppn", str(lab.ranks_per_host), "-wdir", "/")


def _open_mpi(lab: Lab) -> Command:
    """Return Open MPI's options: labhead starts all helpers, and no rank is bound, as every host counts from core 0."""
    names = ",".join(f"{host.name}:{lab.ranks_per_host}" for host in lab.members)
    ssh = ("--prtemca", "plm_ssh_agent", ENTER, "--prtemca", "plm_ssh_no_tree_spawn", "1")
    files = ("--prtemca", "prte_tmpdir_base", "/dev/shm")
    network = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm", "--mca", "osc", "^ucx")
    return (*ssh, *files, *network, "--bind-to", "none", "--wdir", "/", "--host", names)


def lab_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: `environment`, with UCX kept from bypassing the network."""
    return {**environment, "UCX_TLS": "tcp,self"}
