"""One line names what is missing to build a lab."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.progress import run

from unisono.errors import LabError
from unisono.lab import cluster
from unisono.lab.cluster import enter_script, lab_environment, mpiexec_command
from unisono.lab.plan import Lab


def test_root_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="which takes root; try sudo"):
        cluster.check_machine()


@pytest.mark.parametrize("missing", ["ip", "tc", "unshare"])
def test_programs_are_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str) -> None:
    for program in set(cluster.PACKAGES) - {missing}:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=f"there is no `{missing}` on PATH; install {cluster.PACKAGES[missing]}"):
        cluster.check_machine()


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
@pytest.mark.skipif(not all(map(shutil.which, cluster.PACKAGES)), reason="iproute2 or util-linux is missing")
def test_a_kernel_that_refuses() -> None:
    weaken = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")
    lab = (sys.executable, "-m", "unisono", "lab", "--hosts", "2", "--rate", "1gbit", "--", "true")
    done = run([*weaken, *lab])
    assert done.returncode == 2
    assert done.stderr.startswith("unisono: the kernel refuses new namespaces (unshare: ")
    assert done.stderr.count("\n") == 1


LAB = Lab(supernodes=1, hosts=2, rate=200_000_000, ranks_per_host=3)


def test_hydra_reaches_every_host_by_the_script() -> None:
    command = " ".join(mpiexec_command(LAB, "/x/mpiexec", False, "/here", ("a", "b c")))
    assert command.startswith("/x/mpiexec -launcher ssh -launcher-exec /dev/shm/lab/enter -localhost labhead ")
    assert "-hosts h0,h1 -ppn 3 -wdir / unshare --mount " in command
    assert command.endswith("/here a b c")


def test_open_mpi_starts_all_helpers_from_one_place_and_binds_no_rank() -> None:
    command = " ".join(mpiexec_command(LAB, "/x/mpiexec", True, "/here", ("a",)))
    assert "--prtemca plm_ssh_agent /dev/shm/lab/enter --prtemca plm_ssh_no_tree_spawn 1 " in command
    assert "--mca pml ob1 --mca btl tcp,self,sm " in command
    assert "--bind-to none --wdir / --host h0:3,h1:3 unshare --mount " in command


def test_the_environment_is_kept_and_ucx_held_to_the_network() -> None:
    assert lab_environment({"A": "b", "UCX_TLS": "all"}) == {"A": "b", "UCX_TLS": "tcp,self"}


def test_the_script_enters_the_host_it_is_given() -> None:
    assert "exec nsenter --net=/dev/shm/lab/$host/net --uts=/dev/shm/lab/$host/uts" in enter_script()
