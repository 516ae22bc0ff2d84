"""Launch of ranks: detection of a launcher, the command that starts several ranks, and the timeout of their waits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from unisono.errors import LaunchError, UsageError, install_command

SIZE_VARIABLES, RANK_VARIABLES, LOCAL_SIZE_VARIABLES, LOCAL_RANK_VARIABLES = zip(
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),  # the MPICH family, Intel and Cray among it
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PALS_SIZE", "PALS_RANKID", "PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID"),
    strict=True,
)
"""Variables in which launchers, one a row, count all ranks and number this one; count and number those of its node."""

INSTALL_HINT = f"install one with: {install_command('mpich')}"


def ranks_started(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks that the launcher started, this process included; None where no launcher did.

    Slurm's batch scripts and interactive shells have SLURM_PROCID too, but are no ranks: only the tasks of a step with
    several tasks are.
    """
    tasks = _number(["SLURM_STEP_NUM_TASKS"], environment) if environment.get("SLURM_PROCID") else None
    return _number(SIZE_VARIABLES, environment) or (tasks if (tasks or 1) > 1 else None)


def rank_started(environment: Mapping[str, str]) -> int:
    """Return the rank that the launcher gave to this process; 0 where no launcher started it."""
    return _number((*RANK_VARIABLES, "SLURM_PROCID"), environment) or 0


def local_rank_started(environment: Mapping[str, str]) -> int:
    """Return the number of this process among its node's, as its launcher has given it; 0 without a launcher."""
    return _number((*LOCAL_RANK_VARIABLES, "SLURM_LOCALID"), environment) or 0


def on_one_node(environment: Mapping[str, str]) -> bool:
    """Return True if a launcher says that it has started all ranks on this node."""
    started = ranks_started(environment)
    if started is not None and "SLURM_STEP_NUM_NODES" in environment and "SLURM_PROCID" in environment:
        return _number(["SLURM_STEP_NUM_NODES"], environment) == 1
    return started is not None and started == _number(LOCAL_SIZE_VARIABLES, environment)


def _number(names: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Return the number in the first of these variables that is set and not empty. Raises LaunchError for no number."""
    name = next((name for name in names if environment.get(name)), None)
    if name is not None and not environment[name].isdecimal():
        raise LaunchError(f"{name}={environment[name]}: launchers set it to a number of ranks, or of one; unset it")
    return None if name is None else int(environment[name])


LIBRARY_VERSION = re.compile(r"(Open MPI|Intel|MVAPICH2?|CRAY MPICH|MPICH)\D*(\d[\w.]*)")
"""Name and version in the text with which an MPI library describes itself."""

SLURM_TYPES = {"Open MPI": "pmix", "CRAY MPICH": "cray_shasta"}
"""Values of srun's --mpi for MPI libraries that do not use pmi2."""


def describe_mismatch(environment: Mapping[str, str], started: int, size: int, library: str) -> str:
    """Return the error message where a launcher has `started` more ranks than the MPI library finds, with the remedy.

    `library` is the text with which the library describes itself. Slurm connects no ranks unless `--mpi` names the
    protocol of the library.
    """
    match = LIBRARY_VERSION.search(library)
    name, version = match.groups() if match else (library.splitlines()[0].strip(), "")
    shown = f"{name.replace('CRAY', 'Cray').replace('Intel', 'Intel MPI')} {version}".strip()
    remedy = "use that library's mpiexec"
    if "SLURM_JOB_ID" in environment:
        protocol = SLURM_TYPES.get(name, "pmi2")
        remedy = f"under Slurm, use srun --mpi={protocol}, or first export SLURM_MPI_TYPE={protocol}"
    sizes = f"{started} ranks were started, but this MPI library sees {size}"
    return f"{sizes}: the launcher did not connect {shown}; {remedy}"


SPARE = "UNISONO_SPARE_CORES"
"""Variable with cores, 0,16, that are left to the interrupts of the network adapter (PCL-DNN 5.3)."""


def available_cores() -> frozenset[int]:
    """Return the cores that this process may use, without those of SPARE; empty where the system does not list them.

    Raises UsageError where SPARE names no cores. A process that has no others keeps them.
    """
    if not re.fullmatch(r"(\d+(,\d+)*)?", spare := os.environ.get(SPARE, "")):
        raise UsageError(f"{SPARE}={spare}; it must be numbers of cores, 0 or 0,16")
    allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    return allowed - {int(core) for core in re.findall(r"\d+", spare)} or allowed


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(available_cores()) or os.cpu_count() or 1


def find_mpiexec() -> Path:
    """Return the mpiexec beside this Python, else the first on PATH.

    Raises LaunchError naming the extra that provides one.
    """
    for folder in (f"{sys.prefix}/bin", None):
        if mpiexec := shutil.which("mpiexec", path=folder):
            return Path(mpiexec)
    raise LaunchError(f"no mpiexec beside {sys.executable} nor on PATH; {INSTALL_HINT}")


def launch_command(mpiexec: Path, ranks: int, arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs `unisono ARGUMENTS` on `ranks` ranks of this machine, with more options of
    mpiexec. With -P, no file of the current folder takes the place of a module."""
    return [str(mpiexec), *options, "-n", str(ranks), sys.executable, "-P", "-m", "unisono", *arguments]


SURVIVAL = ("--with-ft", "ulfm", "--mca", "opal_event_include", "poll", "--mca", "osc", "^ucx", "--bind-to", "none")
"""Options of Open MPI's mpiexec with which the others go on after a rank has died. With its default event library
(epoll), messages over TCP sometimes stop after a death."""

ON_THIS_MACHINE = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user", "PRTE_MCA_plm": "^slurm", "PRTE_MCA_ras": "^slurm"}
"""Settings of Hydra and PRRTE with which ranks start here, and not on all nodes that a batch system has allocated."""

MEMORY_VARIABLE, SURVIVORS_VARIABLE = "UNISONO_MEMORY", "UNISONO_SURVIVORS"
"""Environment variables of an elastic run's ranks: the folder in memory for what the next ones begin with; and, where
those that are left after a death go on in their processes, the least number of them and their arguments, in JSON."""


@cache
def is_open_mpi(mpiexec: Path) -> bool:
    """Return True for Open MPI's mpiexec, False for one of the MPICH family, and for what is no program."""
    try:
        version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in version


MALLOC_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"  # ask Linux for pages of 2 MB
    ":glibc.malloc.mmap_max=0"  # no mmap for large tensors, which would be returned when freed
    f":glibc.malloc.trim_threshold={1 << 36}"  # keep freed memory for the next step
}
"""Settings of glibc's memory allocation. Without them, memory that a step keeps for its backward pass is returned to
the system and allocated anew in each step: a fifth of a step of ResNet-50 on two cores of a virtual machine
(benchmarks/networks: tuned beside kept).
"""


def keep_memory() -> None:
    """Restart this program, once, with MALLOC_ENVIRONMENT, which glibc reads at its start; set variables are kept."""
    if not MALLOC_ENVIRONMENT.keys() <= os.environ.keys():
        os.execve(sys.executable, sys.orig_argv, {**MALLOC_ENVIRONMENT, **os.environ})


def launch_environment(environment: Mapping[str, str], terminal: bool) -> dict[str, str]:
    """Return the environment of the ranks: this process's, and the terminal's properties, hidden by a launcher's pipe.

    Memory is kept from step to step, in huge pages, unless the environment says otherwise. Open MPI refuses more ranks
    than cores, and root; on one machine, with the number of ranks requested, both are intended.
    """
    extra = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if os.geteuid() == 0:
        extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if terminal:  # Rich reads these
        extra |= {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    return {**MALLOC_ENVIRONMENT, **environment, **extra}


TIMEOUT = 600.0
"""Default timeout in seconds."""


def timeout_of(timeout: float | None) -> float:
    """Return the timeout in seconds: `timeout`, else the environment's UNISONO_TIMEOUT, else TIMEOUT.

    Raises UsageError where it is no number above 0.
    """
    value = os.environ.get("UNISONO_TIMEOUT", TIMEOUT) if timeout is None else timeout
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        source = "UNISONO_TIMEOUT" if timeout is None else "timeout"
        raise UsageError(f"{source} = {value}; it must be a number of seconds above 0")
    return seconds
