import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono import launch
from unisono.errors import LaunchError, UsageError
from unisono.launch import (
    available_cores,
    cores,
    describe_mismatch,
    find_mpiexec,
    launch_command,
    launch_environment,
    ranks_started,
)


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script, not a step of srun
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # an interactive shell
        ({"OMPI_COMM_WORLD_SIZE": "", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": ""}, None),
    ],
)
def test_ranks_started(environment: dict[str, str], ranks: int | None) -> None:
    assert ranks_started(environment) == ranks


def test_a_variable_of_a_launcher_that_is_no_number_is_named(in_process: Run) -> None:
    assert_one_line_error(in_process("draw", "ring", PMI_SIZE="two"), "PMI_SIZE=two: launchers set it to a number")


SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environment", "library", "remedy"),
    [
        (SLURM, "MPICH Version:      5.0.2\nMPICH Release date: ...", "MPICH 5.0.2; under Slurm, use srun --mpi=pmi2"),
        (SLURM, "MPICH Version:\t4.2rc1\n", "MPICH 4.2rc1; under Slurm, use srun --mpi=pmi2"),
        (SLURM, "Intel(R) MPI Library 2021.13 for Linux* OS\n", "Intel MPI 2021.13; under Slurm, use srun --mpi=pmi2"),
        (SLURM, "MVAPICH2 Version      :\t2.3.7\n", "MVAPICH2 2.3.7; under Slurm, use srun --mpi=pmi2"),
        (SLURM, "MPI VERSION    : CRAY MPICH version 8.1.29.18 (ANL base 3.4a2)", "Cray MPICH 8.1.29.18; under Slurm"),
        (SLURM, "Open MPI v5.0.8, package: Open MPI a@b", "Open MPI 5.0.8; under Slurm, use srun --mpi=pmix, or"),
        (SLURM, "Some MPI 3\nmore", "Some MPI 3; under Slurm, use srun --mpi=pmi2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "MPICH Version:      5.0.2", "MPICH 5.0.2; use that library's mpiexec"),
    ],
)
def test_a_launcher_of_another_mpi_gets_the_remedy(environment: dict[str, str], library: str, remedy: str) -> None:
    message = describe_mismatch(environment, 2, 1, library)
    assert f"2 ranks were started, but this MPI library sees 1: the launcher did not connect {remedy}" in message
    assert ("SLURM_MPI_TYPE=" in message) == ("SLURM_JOB_ID" in environment)


def test_no_mpiexec_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"no mpiexec .* pip install '\.\[mpich\]'"):
        find_mpiexec()


def test_a_launcher_is_asked_once_for_its_name(tmp_path: Path) -> None:
    (mpiexec := tmp_path / "mpiexec").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/log\necho Open MPI\n")
    mpiexec.chmod(0o755)
    assert launch.is_open_mpi(mpiexec) and launch.is_open_mpi(mpiexec)
    assert (tmp_path / "log").read_text() == "asked\n"


def test_the_command() -> None:
    command = launch_command(Path("/x/mpiexec"), 3, ["train", "a.toml"])
    assert command[:3] == ["/x/mpiexec", "-n", "3"]
    assert command[-5:] == ["-P", "-m", "unisono", "train", "a.toml"]


def test_no_module_of_ours_is_started_with_the_current_folder_on_its_path() -> None:
    for path in Path(launch.__file__).parent.rglob("*.py"):
        assert not re.search(r'(?<!"-P", )"-m", "unisono', path.read_text()), path


def test_memory_is_kept_from_step_to_step_unless_the_user_says_otherwise() -> None:
    assert launch_environment({}, terminal=False)["GLIBC_TUNABLES"].startswith("glibc.malloc.hugetlb=1:")
    assert launch_environment({"GLIBC_TUNABLES": ""}, terminal=False)["GLIBC_TUNABLES"] == ""


@pytest.mark.parametrize(
    ("before", "after"), [(None, launch.MALLOC_ENVIRONMENT["GLIBC_TUNABLES"]), ("glibc.malloc.check=0", None)]
)
def test_a_program_restarts_to_keep_memory(before: str | None, after: str | None) -> None:
    program = "import os, sys\nfrom unisono.launch import keep_memory\nprint(os.getpid())\nsys.stdout.flush()\n"
    program += "keep_memory()\nprint(os.environ['GLIBC_TUNABLES'])"
    environment = {key: value for key, value in os.environ.items() if key not in launch.MALLOC_ENVIRONMENT}
    environment |= {} if before is None else {"GLIBC_TUNABLES": before}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    *pids, setting = said.stdout.split()
    assert setting == (after or before)
    assert len(pids) == (1 if before else 2)
    assert len(set(pids)) == 1


def test_ranks_know_the_terminal_behind_a_pipe() -> None:
    assert launch_environment({"A": "b"}, terminal=True)["TTY_INTERACTIVE"] == "1"
    assert "TTY_INTERACTIVE" not in launch_environment({"A": "b"}, terminal=False)
    assert launch_environment({"A": "b"}, terminal=False)["A"] == "b"


@pytest.mark.skipif(not available_cores(), reason="this system does not say which cores a process may use")
def test_cores_are_left_to_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 16, 17})
    for spare, left in (("", {0, 1, 16, 17}), ("0", {1, 16, 17}), ("0,16", {1, 17}), ("0,1,16,17", {0, 1, 16, 17})):
        monkeypatch.setenv("UNISONO_SPARE_CORES", spare)
        assert available_cores() == left
        assert cores() == len(left)
    monkeypatch.setenv("UNISONO_SPARE_CORES", "one")
    with pytest.raises(UsageError, match="UNISONO_SPARE_CORES=one; it must be numbers of cores"):
        available_cores()
