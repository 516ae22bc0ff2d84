"""Options and environment of both launcher families in a lab."""

from __future__ import annotations

from unisono.lab.inside import enter_script, lab_environment, mpiexec_command
from unisono.lab.plan import Lab

LAB = Lab(supernodes=1, hosts=2, rate=200_000_000, ranks_per_host=3)


def test_hydra_reaches_every_host_by_the_script() -> None:
    command = " ".join(mpiexec_command(LAB, "/x/mpiexec", "HYDRA build details:", "/here", ("a", "b c")))
    assert command.startswith("/x/mpiexec -launcher ssh -launcher-exec /dev/shm/lab/enter -localhost labhead ")
    assert "-hosts h0,h1 -ppn 3 -wdir / unshare --mount " in command
    assert command.endswith("/here a b c")


def test_open_mpi_starts_all_helpers_from_one_place_and_binds_no_rank() -> None:
    command = " ".join(mpiexec_command(LAB, "/x/mpiexec", "mpiexec (Open MPI) 5.0.11", "/here", ("a",)))
    assert "--prtemca plm_ssh_agent /dev/shm/lab/enter --prtemca plm_ssh_no_tree_spawn 1 " in command
    assert "--mca pml ob1 --mca btl tcp,self,sm " in command
    assert "--bind-to none --wdir / --host h0:3,h1:3 unshare --mount " in command


def test_the_environment_is_kept_and_ucx_held_to_the_network() -> None:
    assert lab_environment({"A": "b", "UCX_TLS": "all"}) == {"A": "b", "UCX_TLS": "tcp,self"}


def test_the_script_enters_the_host_it_is_given() -> None:
    assert "exec nsenter --net=/dev/shm/lab/$host/net --uts=/dev/shm/lab/$host/uts" in enter_script()
