"""How mpiexec is told to start ranks on the hosts of a lab: its options, its environment, the script in place of ssh.

Two families of launchers are known, MPICH's hydra and Open MPI's. Both reach a host by running `ssh HOST COMMAND`, and
both let another program stand in for ssh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.lab.plan import HEAD, HOME, KINDS, OTHER_TMP, Command, Lab

ENTER = f"{HOME}/enter"

OPEN_MPI = "Open MPI"
"""What Open MPI's mpiexec calls itself."""

UNCOVER = 'umount --lazy /tmp && cd "$0" && exec "$@"'
"""What a rank does first: it leaves the /tmp that the launcher's helper has, and goes to the folder it belongs in."""


def enter_script() -> str:
    """Stands in for ssh: enter [-OPTION...] HOST COMMAND... runs the command on that host.

    What runs there first is the launcher's helper. Hydra's leaves a file in /tmp when it is killed, so it gets another.
    """
    namespaces = " ".join(f"--{kind}={HOME}/$host/{kind}" for kind in KINDS)
    mounts = f"mount --rbind {OTHER_TMP} /tmp && mount --bind {HOME}/$host/shm /dev/shm && mount -t sysfs lab /sys"
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter {namespaces} -- unshare --mount -- sh -c "{mounts} && $*"
"""


def mpiexec_command(lab: Lab, mpiexec: str, version: str, folder: str, command: Sequence[str]) -> Command:
    """mpiexec with the options that run `command` in `folder` on every host; `version` is what it says of itself."""
    uncovered = ("unshare", "--mount", "--", "sh", "-c", UNCOVER, folder, *command)
    if OPEN_MPI in version:
        return (mpiexec, *_open_mpi(lab), *uncovered)
    return (mpiexec, *_hydra(lab), *uncovered)


def _hydra(lab: Lab) -> Command:
    names = ",".join(host.name for host in lab.members)
    ssh = ("-launcher", "ssh", "-launcher-exec", ENTER, "-localhost", HEAD)
    return (*ssh, "-hosts", names, "-ppn", str(lab.ranks_per_host), "-wdir", "/")


def _open_mpi(lab: Lab) -> Command:
    """All its helpers are started from labhead, and no rank is bound to a core, since every host counts from core 0."""
    names = ",".join(f"{host.name}:{lab.ranks_per_host}" for host in lab.members)
    ssh = ("--prtemca", "plm_ssh_agent", ENTER, "--prtemca", "plm_ssh_no_tree_spawn", "1")
    files = ("--prtemca", "prte_tmpdir_base", "/dev/shm")
    network = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm", "--mca", "osc", "^ucx")
    return (*ssh, *files, *network, "--bind-to", "none", "--wdir", "/", "--host", names)


def lab_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks: as it is, with UCX kept from finding ways around the network."""
    return {**environment, "UCX_TLS": "tcp,self"}
